/* The same numbers as a table, for those who don't point at pictures. */

/** Rows of a table that a browser still shows at once. */
const MOST_ROWS = 5000;

/** Adds a table of the steps of one rank, which is made once somebody unfolds it. */
class StepTable {
  constructor(root) {
    this.ranks = element("select", { "aria-label": "rank of the table" });
    this.scroll = element("div", { class: "scroll", tabindex: "0" });
    this.folded = element("details", { class: "steps" }, element("summary", {}, "Steps as a table"),
      element("label", {}, "rank ", this.ranks), this.scroll);
    root.append(this.folded);
    this.ranks.addEventListener("change", () => this.fill());
    this.folded.addEventListener("toggle", () => this.fill());
  }

  show(view) {
    this.view = view;
    this.ranks.replaceChildren(...view.ranks.map((rank, row) => element("option", { value: row }, String(rank))));
    this.fill();
  }

  fill() {
    if (!this.folded.open) return;
    const { view } = this;
    const row = Number(this.ranks.value);
    const { scale, unit } = view.tell;
    const time = (value) => (value / scale).toFixed(3);
    const blamed = [...new Set(view.blames.map((blame) => blame[2])), kinds.length - 1];
    const heads = ["step", `begins ${unit}`, `compute ${unit}`, `stall ${unit}`,
      ...blamed.map((kind) => `${kinds[kind].name.replace("stall: ", "")} ${unit}`),
      `overhead ${unit}`, "sent bytes", "pairs", "GFLOP/s"];
    const body = element("tbody");
    const most = Math.min(view.steps, MOST_ROWS);
    for (let step = 0; step < most; step++) {
      const at = view.at(row, step);
      const sums = kinds.map(() => 0);
      for (const { kind, begin, end } of view.stalls(at)) sums[kind] += end - begin;
      const cells = [String(step), time(view.started[at]), time(view.compute(at)), time(view.stall(at)),
        ...blamed.map((kind) => time(sums[kind])), time(view.overhead(at)), counted(view.bytes_sent[at]),
        counted(view.pairs[at]), rate(view.flops[at], view.compute(at)).replace(" GFLOP/s", "")];
      body.append(element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
    }
    const head = element("thead", {}, element("tr", {}, ...heads.map((text) =>
      element("th", { scope: "col" }, text))));
    const note = most < view.steps ? [element("p", { class: "note" }, `The first ${most} of ${view.steps} steps.`)] : [];
    this.scroll.replaceChildren(element("table", {}, head, body), ...note);
  }
}
