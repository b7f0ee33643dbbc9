// The strip: the slots of a window in one forward.

const KINDS = {
  text: "text before", commit: "committed", held: "waiting", fill: "filled",
  reject: "rejected", mask: "masked",
};

function drawStrip(strip, cells) {
  const shown = cells.map((cell) => {
    const item = document.createElement("span");
    item.className = `cell ${cell.kind}${cell.early ? " early" : ""}`;
    item.textContent = cell.text.replaceAll("\n", "⏎");
    item.style.setProperty("--sure", sureness(cell.entropy));
    item.title = [
      KINDS[cell.kind] + (cell.early ? ", out of order" : ""),
      cell.entropy === null ? "" : `${cell.entropy.toFixed(2)} nats`,
    ].filter(Boolean).join(", ");
    return item;
  });
  strip.replaceChildren(...shown);
  strip.setAttribute("aria-label", cells.length ? said(cells) : "no forward yet");
}

// The strip in words: how many of each kind, and what was committed.
function said(cells) {
  const count = (kind) => cells.filter((cell) => cell.kind === kind).length;
  const parts = Object.keys(KINDS).filter((kind) => kind !== "text" && count(kind))
    .map((kind) => `${count(kind)} ${KINDS[kind]}`);
  const early = cells.filter((cell) => cell.early).length;
  if (early) parts.push(`${early} out of order`);
  const text = cells.filter((cell) => cell.kind === "commit").map((cell) => cell.text).join("");
  return parts.join(", ") + (text.trim() ? `. Committed: ${text}` : "");
}
