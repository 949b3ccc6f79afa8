/* Puts everything into its place. */

const { kinds, groups, files, charts } = JSON.parse(document.getElementById("data").textContent);

/** Show the timeline of a file; one that is folded up when it is unfolded. */
function openFile(root) {
  const all = files[Number(root.dataset.file)].passes;
  const passes = all.filter((pass) => pass.views.length);
  for (const { direction, repeats, views } of all) {
    if (views.length) continue;
    root.append(element("p", { class: "note" }, repeats
      ? `The ${direction} pass is too large for this page beside the others: give fewer files.`
      : `No repeat of the ${direction} pass was timed, so there is no timeline of it.`));
  }
  if (!passes.length) return null;
  let table = null;
  const timeline = new Timeline(root, passes, (view) => table?.show(view));
  table = new StepTable(root);
  table.show(timeline.view);
  return timeline;
}

const timelines = [];
for (const root of document.querySelectorAll(".timeline")) {
  const folder = root.closest("details");
  const open = () => {
    if (!folder.open || root.childElementCount) return;
    const timeline = openFile(root);
    if (timeline) timelines.push(timeline);
  };
  folder.addEventListener("toggle", open);
  open();
}
for (const figure of document.querySelectorAll("[data-chart]")) drawChart(figure, charts[Number(figure.dataset.chart)]);

const redraw = () => timelines.forEach((timeline) => timeline.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printing", printing);
    redraw();
  });
}
