// The map: a row a forward, a column a place of the answer. AR is a long thin staircase.

// Draws a trace on a scale that all lanes share; what comes after `count` forwards is faint.
function drawMap(canvas, trace, count, scale) {
  const {width, height} = canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const draw = canvas.getContext("2d"), paint = paints(canvas);
  const x = canvas.width / Math.max(scale.places, 1);
  const y = canvas.height / Math.max(scale.forwards, 1);
  const box = (place, row, colour, alpha) => {
    draw.globalAlpha = row < count ? alpha : alpha / 4;
    draw.fillStyle = colour;
    draw.fillRect(place * x, row * y, Math.max(x - (x > 4), 1), Math.max(y - (y > 4), 1));
  };
  for (let row = 0; row < trace.length; row++) {
    for (const {kind, place, entropy} of trace.slots(row)) {
      if (place < 0 || kind === "text") continue;
      if (kind === "commit") box(place, row, paint.accent, 1);
      else if (kind === "reject") box(place, row, paint.reject, 0.8);
      else box(place, row, paint.accent, (kind === "mask" ? 0.06 : 0.2) + 0.25 * sureness(entropy));
    }
  }
  if (count && count < trace.length) {
    draw.globalAlpha = 1;
    draw.fillStyle = paint.edge;
    draw.fillRect(0, count * y, canvas.width, ratio);
  }
  const {tokens, forwards} = trace.figures(count);
  canvas.setAttribute("aria-label", `${forwards} forwards for ${tokens} tokens of the answer`);
}

// The theme's colours, as the canvas takes them.
function paints(canvas) {
  const probe = document.createElement("i");
  canvas.after(probe);
  const paint = {};
  for (const name of ["accent", "reject", "edge"]) {
    probe.style.color = `var(--${name})`;
    paint[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return paint;
}
