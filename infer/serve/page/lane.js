// A lane: one decoder in the race, its counters, answer, window and map.

class Lane {
  constructor(name, detail, first) {
    this.trace = new Trace();
    this.name = name;
    this.node = document.getElementById("lane").content.firstElementChild.cloneNode(true);
    this.node.classList.toggle("first", first);
    this.node.querySelector("h2").id = `lane-${first ? "first" : "second"}`;
    this.node.setAttribute("aria-labelledby", this.part("h2").id);
    this.part(".name").textContent = name;
    this.part("h2 small").textContent = detail;
    // Only one answer is read out while both come.
    if (first) this.part(".answer").setAttribute("aria-live", "polite");
    this.part(".answer").tabIndex = 0;
    this.part(".answer").setAttribute("role", "region");
    this.part(".answer").setAttribute("aria-label", `Answer of ${name}`);
    this.shown = 0;
  }

  part(selector) { return this.node.querySelector(selector); }

  show(count, scale) {
    count = Math.min(count, this.trace.length);
    const figures = this.trace.figures(count);
    const digits = {rate: 2, cached: 2, speed: figures.speed < 100 ? 1 : 0};
    for (const dd of this.node.querySelectorAll("dd")) {
      const value = figures[dd.dataset.is];
      dd.textContent = value === undefined ? "–" : value.toFixed(digits[dd.dataset.is] ?? 0);
    }
    this.showAnswer(count);
    const total = this.trace.length;
    this.part(".step").textContent = count ? `in forward ${count} of ${total}` : "";
    drawStrip(this.part(".strip"), count ? this.trace.slots(count - 1) : []);
    drawMap(this.part(".map"), this.trace, count, scale);
  }

  // Appends what is new, so that a screen reader says that alone.
  showAnswer(count) {
    const answer = this.part(".answer");
    const text = this.trace.totals[count].text;
    const known = this.trace.totals[Math.max(count - 1, 0)].text;
    if (count !== this.shown + 1) answer.replaceChildren(...(known ? [known] : []));
    else answer.querySelector(".new")?.classList.remove("new");
    this.shown = count;
    if (text.length > known.length) {
      const piece = document.createElement("span");
      piece.className = "new";
      piece.textContent = text.slice(known.length);
      answer.append(piece);
    }
    answer.scrollTop = answer.scrollHeight;
  }
}
