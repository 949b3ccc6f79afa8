/* Ranks and steps on a canvas: what each did when, and what travelled. */

const COMPUTE = 0, OVERHEAD = 1;

/** Nanoseconds between pieces of a stall that come from rounding each to one. */
const ROUNDING = 2;

const MARGIN = { left: 78, right: 10, top: 6, bottom: 30 };

/** Steps narrower than so many pixels are not drawn one by one: a column then shows the shares of several. */
const NARROW = 2, STEPS_OF_COLUMN = 8;

/** More arrows than this hide what is below them; those with the longest stalls are drawn. */
const MOST_ARROWS = 150;

/** One repeat as it was recorded; knows times, not pixels. A step is counted over all ranks shown. */
class View {
  constructor(told) {
    Object.assign(this, told);
    this.tell = clockFor(this.makespan);
    this.rows = this.ranks.length;
    this.pieces = new Map();
    for (const [row, step, kind, begin, end, who] of this.blames) {
      const at = this.at(row, step);
      if (!this.pieces.has(at)) this.pieces.set(at, []);
      this.pieces.get(at).push({ kind, begin, end, who });
    }
    this.arrows = this.hops.map(([sender, step, receiver, due, nbytes, part]) => ({
      sender, step, receiver, due, nbytes, part,
      begin: this.moment("posted", this.at(sender, step)),
      end: this.moment("received", this.at(receiver, due)),
    }));
  }

  at(row, step) { return row * this.steps + step; }
  moment(name, at) { return this.started[at] + this[name][at]; }
  end(at) { return this.moment("step_end", at); }
  compute(at) { return this.compute_done[at] - this.launched[at]; }
  stall(at) { return this.waited[at] - this.compute_done[at]; }
  overhead(at) { return this.step_end[at] - this.compute(at) - this.stall(at); }

  /** Return the stall of a step in pieces, each of one kind; what no cause is known for is the last kind. */
  stalls(at) {
    const unblamed = kinds.length - 1;
    const last = this.moment("waited", at);
    const found = [];
    let from = this.moment("compute_done", at);
    for (const piece of this.pieces.get(at) ?? []) {
      const begin = Math.max(from, piece.begin), end = Math.min(last, piece.end);
      if (end <= begin) continue;
      if (begin > from + ROUNDING) found.push({ kind: unblamed, begin: from, end: begin });
      found.push({ ...piece, begin, end });
      from = end;
    }
    if (last > from + ROUNDING) found.push({ kind: unblamed, begin: from, end: last });
    return found;
  }

  /** Return the first step of a row that ends after a moment. */
  firstAfter(row, time) {
    let low = 0, high = this.steps;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end(this.at(row, middle)) > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  /** Return the seconds of each kind, of all ranks shown together. */
  totals() {
    const sums = kinds.map(() => 0);
    for (let at = 0; at < this.started.length; at++) {
      sums[COMPUTE] += this.compute(at);
      sums[OVERHEAD] += this.overhead(at);
      for (const { kind, begin, end } of this.stalls(at)) sums[kind] += end - begin;
    }
    return sums;
  }

  /** Return what there is to say of a step, as pairs of name and text. */
  told(row, step) {
    const at = this.at(row, step);
    const pairs = [
      ["compute", this.tell(this.compute(at))],
      ...(this.polling[at] > 0 ? [["progress took", this.tell(this.polling[at])]] : []),
      ["stall", this.tell(this.stall(at))],
      ...this.stalls(at).map((piece) => [why(piece), this.tell(piece.end - piece.begin)]),
      ["overhead", this.tell(this.overhead(at))],
      ["begins", this.tell(this.started[at])],
      ["sent", megabytes(this.bytes_sent[at])],
      ["pairs", counted(this.pairs[at])],
      ["speed", rate(this.flops[at], this.compute(at))],
    ];
    for (const arrow of this.arrowsOf(row, step).slice(0, 4)) {
      const [way, peer] = arrow.sender === row && arrow.step === step
        ? ["to", arrow.receiver] : ["from", arrow.sender];
      pairs.push([`${arrow.part} ${way} rank ${this.ranks[peer]}`, megabytes(arrow.nbytes)]);
    }
    return pairs;
  }

  /** Return the hops that a row posts, or waits for, in a step. */
  arrowsOf(row, step) {
    return this.arrows.filter((arrow) =>
      (arrow.sender === row && arrow.step === step) || (arrow.receiver === row && arrow.due === step));
  }
}

/** Tell what a piece of stall is blamed on, and whom. */
function why({ kind, who }) {
  return [kinds[kind].name.replace("stall: ", ""), who].filter(Boolean).join(": ");
}

/** Draws a view, and lets a person look around in it. */
class Timeline {
  constructor(root, passes, onView) {
    this.root = root;
    this.passes = passes;
    this.onView = onView;
    this.pointed = null;
    this.withArrows = true;
    this.build();
    this.choose(0, 0);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  build() {
    this.passSelect = element("select", { "aria-label": "pass" },
      ...this.passes.map((pass, at) => element("option", { value: at }, pass.direction)));
    this.repeatSelect = element("select", { "aria-label": "repeat" });
    const arrows = element("input", { type: "checkbox", checked: "" });
    const button = (text, label, act) => {
      const made = element("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.legend = element("ul", { class: "legend", "aria-label": "time of all ranks shown, by kind" });
    this.canvas = element("canvas", { tabindex: "0", role: "application" });
    this.plot = element("div", { class: "plot" }, this.canvas);
    this.note = element("p", { class: "note" });
    this.narrow = element("p", { class: "note", hidden: "" },
      "Steps are too narrow to be drawn one by one: columns show the shares of what ranks did; zoom in for steps.");
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.root.append(
      element("div", { class: "tools" }, element("h3", {}, "Timeline"),
        element("label", {}, "pass ", this.passSelect), element("label", {}, "repeat ", this.repeatSelect),
        element("label", {}, arrows, "transfers"),
        element("span", { class: "zoom" },
          button("\u2212", "zoom out", () => this.zoom(2)), button("+", "zoom in", () => this.zoom(0.5)),
          button("all", "show the whole", () => this.whole()))),
      this.legend, this.plot, this.note, this.narrow,
      element("p", { class: "hint" }, "Click, then: wheel or + \u2212 zoom, drag or Shift + arrows move, " +
        "arrow keys go from step to step, 0 shows the whole."),
      this.readout,
    );
    this.passSelect.addEventListener("change", () => this.choose(Number(this.passSelect.value), 0));
    this.repeatSelect.addEventListener("change", () =>
      this.choose(Number(this.passSelect.value), Number(this.repeatSelect.value)));
    arrows.addEventListener("change", () => { this.withArrows = arrows.checked; this.draw(); });
    this.listen();
  }

  /** Show a repeat of a pass. */
  choose(pass, repeat) {
    const { views, repeats, direction } = this.passes[pass];
    this.view = new View(views[repeat]);
    this.repeatSelect.replaceChildren(...views.map((view, at) => element("option", { value: at },
      `${view.repeat} of ${repeats}: ${clockFor(view.makespan)(view.makespan)}${at === 0 ? ", median" : ""}`)));
    this.repeatSelect.value = repeat;
    this.pointed = null;
    this.readout.textContent = "";
    const { rows, steps, size, ranks, arrows } = this.view;
    this.canvas.setAttribute("aria-label",
      `${direction} pass, ${rows} ranks, ${steps} steps, ${this.view.tell(this.view.makespan)}; ` +
      "arrow keys tell the numbers of a step, a table of all is below");
    const notes = [];
    if (rows < size) notes.push(`${rows} of ${size} ranks are shown.`);
    if (views.length < repeats) notes.push(`${views.length} of ${repeats} repeats are on this page.`);
    if (!this.view.explained) notes.push("Of so many steps neither transfers nor blame are told.");
    if (arrows.length > MOST_ARROWS) {
      notes.push(`Of the transfers in sight the ${MOST_ARROWS} with the longest stalls are drawn.`);
    }
    this.note.textContent = notes.join(" ");
    this.tellTotals();
    this.whole();
    this.onView(this.view);
  }

  tellTotals() {
    const sums = this.view.totals();
    const all = sums.reduce((sum, time) => sum + time, 0) || 1;
    this.legend.replaceChildren(...kinds.map((kind, at) => element("li", { "data-kind": kind.name },
      swatch(kind.colour), kind.name,
      element("b", {}, `${this.view.tell(sums[at])}, ${(100 * sums[at] / all).toFixed(1)}%`)))
      .filter((_, at) => sums[at] > 0));
  }

  whole() {
    this.from = 0;
    this.to = Math.max(1, this.view.makespan);
    this.draw();
  }

  /** Show `factor` times as much time, with the moment at a share of the width where it is. */
  zoom(factor, share = 0.5) {
    const whole = Math.max(1, this.view.makespan);
    const length = Math.min(whole, Math.max(whole * 1e-6, 10, (this.to - this.from) * factor));
    this.moveTo(this.from + (this.to - this.from - length) * share, length);
  }

  moveTo(from, length) {
    this.from = Math.min(Math.max(0, from), Math.max(1, this.view.makespan) - length);
    this.to = this.from + length;
    this.draw();
  }

  x(time) { return MARGIN.left + (time - this.from) / (this.to - this.from) * this.width; }
  y(row) { return MARGIN.top + row * this.rowHeight; }
  time(x) { return this.from + (x - MARGIN.left) / this.width * (this.to - this.from); }

  /** Return the step at a place of the canvas, or null where no step is. */
  stepAt(x, y) {
    const row = Math.floor((y - MARGIN.top) / this.rowHeight);
    if (row < 0 || row >= this.view.rows || x < MARGIN.left) return null;
    const time = this.time(x);
    const step = this.view.firstAfter(row, time);
    return step < this.view.steps && this.view.started[this.view.at(row, step)] <= time ? { row, step } : null;
  }

  listen() {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let drag = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from: this.from };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => {
      drag = null;
      this.canvas.classList.remove("dragging");
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (drag && Math.abs(event.clientX - drag.x) > 2) {
        this.canvas.classList.add("dragging");
        const length = this.to - this.from;
        this.moveTo(drag.from - (event.clientX - drag.x) / this.width * length, length);
      }
      this.point(this.stepAt(...place(event)), event.pageX, event.pageY);
    });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("wheel", (event) => {
      // Without a click before, the wheel scrolls the page, as everywhere else on it.
      if (document.activeElement !== this.canvas && !event.ctrlKey) return;
      event.preventDefault();
      const length = this.to - this.from;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        this.moveTo(this.from + (event.deltaX || event.deltaY) / this.width * length, length);
      } else {
        this.zoom(1.002 ** event.deltaY, (place(event)[0] - MARGIN.left) / this.width);
      }
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      const { key } = event;
      const length = this.to - this.from;
      const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
      if (way && event.shiftKey) this.moveTo(this.from + way[1] * length / 4, length);
      else if (way) this.step(...way);
      else if (key === "+" || key === "=") this.zoom(0.5);
      else if (key === "-") this.zoom(2);
      else if (key === "0" || key === "Home") this.whole();
      else if (key === "Escape") this.point(null);
      else return;
      event.preventDefault();
    });
    this.canvas.addEventListener("blur", () => this.point(null));
  }

  /** Go to another step by the keyboard; the first one where none was pointed at. */
  step(rows, steps) {
    const was = this.pointed ?? { row: -rows, step: -steps };
    const row = Math.min(Math.max(0, was.row + rows), this.view.rows - 1);
    const step = Math.min(Math.max(0, was.step + steps), this.view.steps - 1);
    const at = this.view.at(row, step);
    const length = this.to - this.from;
    if (this.view.end(at) < this.from || this.view.started[at] > this.to) {
      this.moveTo(this.view.started[at] - length / 4, length);
    }
    const box = this.canvas.getBoundingClientRect();
    const x = Math.min(Math.max(MARGIN.left, this.x(this.view.started[at])), box.width - MARGIN.right);
    this.point({ row, step }, box.left + scrollX + x, box.top + scrollY + this.y(row) + this.rowHeight);
  }

  /** Show the numbers of a step, or of none. */
  point(pointed, x, y) {
    const changed = pointed?.row !== this.pointed?.row || pointed?.step !== this.pointed?.step;
    this.pointed = pointed;
    if (pointed === null) hideTip();
    else {
      const title = `rank ${this.view.ranks[pointed.row]}, step ${pointed.step}`;
      const pairs = this.view.told(pointed.row, pointed.step);
      showTip(title, pairs, x, y);
      this.readout.textContent = `${title}: ${pairs.slice(0, 3).map((pair) => pair.join(" ").trim()).join(", ")}`;
    }
    if (changed) this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return; // Folded up.
    const ratio = document.documentElement.classList.contains("printing") ? 3 : devicePixelRatio;
    this.rowHeight = Math.min(36, Math.max(5, Math.floor(640 / this.view.rows)));
    this.width = width - MARGIN.left - MARGIN.right;
    const height = MARGIN.top + this.view.rows * this.rowHeight + MARGIN.bottom;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(this.root);
    this.ink = { paper: "--card", text: "--ink", soft: "--soft", line: "--line" };
    for (const name in this.ink) this.ink[name] = style.getPropertyValue(this.ink[name]).trim();
    pen.fillStyle = this.ink.paper;
    pen.fillRect(0, 0, width, height);
    this.drawAxis(pen, height);
    this.drawNames(pen);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, 0, this.width, height - MARGIN.bottom + 2);
    pen.clip();
    const narrow = [...this.view.ranks.keys()].filter((row) => this.drawRow(pen, row));
    this.narrow.hidden = !narrow.length;
    this.drawArrows(pen);
    pen.restore();
  }

  drawAxis(pen, height) {
    const { scale, unit } = this.view.tell;
    const bottom = height - MARGIN.bottom;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const tick of ticks(this.from / scale, this.to / scale, Math.max(2, this.width / 110))) {
      const x = Math.round(this.x(tick * scale)) + 0.5;
      pen.strokeStyle = this.ink.line;
      pen.beginPath();
      pen.moveTo(x, MARGIN.top);
      pen.lineTo(x, bottom + 4);
      pen.stroke();
      pen.fillStyle = this.ink.soft;
      if (x < MARGIN.left + this.width - 44) pen.fillText(plain(tick), x, bottom + 8);
    }
    pen.textAlign = "right";
    pen.fillText(unit, MARGIN.left + this.width, bottom + 8);
  }

  drawNames(pen) {
    pen.fillStyle = this.ink.soft;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.ceil(14 / this.rowHeight);
    for (let row = 0; row < this.view.rows; row += every) {
      const name = this.rowHeight >= 20 ? `rank ${this.view.ranks[row]}` : String(this.view.ranks[row]);
      pen.fillText(name, MARGIN.left - 8, this.y(row) + this.rowHeight / 2);
    }
  }

  /** Draw what a rank did, step by step, or in columns; return whether in columns. */
  drawRow(pen, row) {
    const view = this.view;
    const gap = this.rowHeight >= 14 ? 3 : 1;
    const top = this.y(row) + gap, height = this.rowHeight - 2 * gap;
    const first = view.firstAfter(row, this.from);
    const steps = Math.min(view.steps, view.firstAfter(row, this.to) + 1) - first;
    if (steps > this.width / NARROW) {
      this.drawColumns(pen, row, first, Math.ceil(STEPS_OF_COLUMN * this.width / steps), top, height);
      this.outline(pen, row, top, height);
      return true;
    }
    const bar = (kind, begin, end) => {
      if (end <= begin) return;
      pen.fillStyle = kinds[kind].colour;
      pen.fillRect(this.x(begin), top, this.x(end) - this.x(begin), height);
    };
    for (let step = first; step < first + steps; step++) {
      const at = view.at(row, step);
      const begin = view.started[at], end = view.end(at);
      bar(OVERHEAD, begin, view.moment("launched", at));
      bar(COMPUTE, view.moment("launched", at), view.moment("compute_done", at));
      for (const piece of view.stalls(at)) bar(piece.kind, piece.begin, piece.end);
      bar(OVERHEAD, view.moment("waited", at), end);
      const left = this.x(begin), wide = this.x(end) - left;
      if (wide > 3) {
        pen.fillStyle = this.ink.paper;
        pen.fillRect(left - 0.5, top, 1, height);
      }
      const attends = this.x(view.moment("compute_done", at)) - this.x(view.moment("launched", at));
      if (attends > 26 && height >= 13) {
        pen.fillStyle = "rgb(255 255 255 / 0.9)";
        pen.font = "11px system-ui, sans-serif";
        pen.textAlign = "left";
        pen.textBaseline = "middle";
        pen.fillText(String(step), Math.max(this.x(view.moment("launched", at)), MARGIN.left) + 6, top + height / 2 + 0.5);
      }
    }
    this.outline(pen, row, top, height);
    return false;
  }

  /** Draw columns of some pixels, each with the shares of its time from the top down. */
  drawColumns(pen, row, first, pixels, top, height) {
    const view = this.view;
    const columns = Math.ceil(this.width / pixels);
    const shares = Array.from({ length: columns }, () => kinds.map(() => 0));
    const length = (this.to - this.from) * pixels / this.width;
    const add = (kind, begin, end) => {
      const last = Math.min(columns - 1, Math.floor((end - this.from) / length));
      for (let column = Math.max(0, Math.floor((begin - this.from) / length)); column <= last; column++) {
        const from = this.from + column * length;
        shares[column][kind] += Math.max(0, Math.min(end, from + length) - Math.max(begin, from)) / length;
      }
    };
    for (let step = first; step < view.steps && view.started[view.at(row, step)] < this.to; step++) {
      const at = view.at(row, step);
      add(OVERHEAD, view.started[at], view.moment("launched", at));
      add(COMPUTE, view.moment("launched", at), view.moment("compute_done", at));
      for (const piece of view.stalls(at)) add(piece.kind, piece.begin, piece.end);
      add(OVERHEAD, view.moment("waited", at), view.end(at));
    }
    shares.forEach((parts, column) => {
      let above = 0;
      parts.forEach((share, kind) => {
        pen.fillStyle = kinds[kind].colour;
        pen.fillRect(MARGIN.left + column * pixels, top + above * height, pixels, share * height);
        above += share;
      });
    });
  }

  /** Draw a frame around the step that is pointed at, if it is of this row. */
  outline(pen, row, top, height) {
    if (this.pointed?.row !== row) return;
    const at = this.view.at(row, this.pointed.step);
    const left = this.x(this.view.started[at]), right = this.x(this.view.end(at));
    pen.strokeStyle = this.ink.text;
    pen.lineWidth = 2;
    pen.strokeRect(left, top - 1, Math.max(2, right - left), height + 2);
    pen.lineWidth = 1;
  }

  drawArrows(pen) {
    const near = this.pointed ? new Set(this.view.arrowsOf(this.pointed.row, this.pointed.step)) : new Set();
    if (this.withArrows) {
      const visible = this.view.arrows.filter((arrow) => arrow.end > this.from && arrow.begin < this.to);
      pen.globalAlpha = near.size ? 0.18 : 0.6;
      for (const arrow of visible.slice(0, MOST_ARROWS)) {
        if (!near.has(arrow)) this.drawArrow(pen, arrow, 1);
      }
      pen.globalAlpha = 1;
    }
    for (const arrow of near) this.drawArrow(pen, arrow, 2);
  }

  drawArrow(pen, arrow, thick) {
    const down = arrow.receiver > arrow.sender;
    const edge = this.rowHeight >= 14 ? 3 : 1;
    const x0 = this.x(arrow.begin), x1 = this.x(arrow.end);
    const y0 = this.y(arrow.sender) + (down ? this.rowHeight - edge : edge);
    const y1 = this.y(arrow.receiver) + (down ? edge : this.rowHeight - edge);
    const head = 3 + 1.5 * thick;
    const angle = Math.atan2(y1 - y0, x1 - x0);
    const line = (colour, width) => {
      pen.strokeStyle = pen.fillStyle = colour;
      pen.lineWidth = width;
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    };
    if (pen.globalAlpha > 0.5) line(this.ink.paper, thick + 2); // So that it shows on every colour.
    line(this.ink.text, thick);
    pen.beginPath();
    pen.moveTo(x1, y1);
    for (const side of [-0.4, 0.4]) {
      pen.lineTo(x1 - head * 1.6 * Math.cos(angle + side), y1 - head * 1.6 * Math.sin(angle + side));
    }
    pen.fill();
  }
}

/** Return a small square of a colour. */
function swatch(colour) {
  return shape("svg", { width: 13, height: 13, "aria-hidden": "true" },
    shape("rect", { width: 13, height: 13, rx: 3, fill: colour }));
}
