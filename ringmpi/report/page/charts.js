/* Charts of several results: lines over numbers, or bars over names. */

const SIZE = { width: 560, height: 330, left: 58, right: 16, top: 12, bottom: 46 };

/** Return a function from values to pixels, with its ticks. */
function scaleFor(axis, low, high, from, to, given = null) {
  const bend = axis.logarithmic ? Math.log2 : (value) => value;
  const [a, b] = [bend(low), bend(high)];
  const place = (value) => from + (bend(value) - a) / ((b - a) || 1) * (to - from);
  let marks = given ?? ticks(low, high, 5);
  if (axis.logarithmic && !given) {
    marks = [];
    for (let power = Math.ceil(a - 1e-9); power <= b + 1e-9; power++) marks.push(2 ** power);
  }
  return Object.assign(place, { marks });
}

/** Draw a chart into a figure, with a legend above it. */
function drawChart(figure, chart) {
  const { width, height, left, right, top, bottom } = SIZE;
  const points = chart.series.flatMap((series) => series.points);
  const xs = [...points.map((point) => point.x), ...chart.guides.map((guide) => guide.x)];
  const ys = points.flatMap((point) => [point.low, point.high]);
  const bars = chart.categories.length > 0;
  const x = bars
    ? scaleFor(chart.x, -0.5, chart.categories.length - 0.5, left, width - right, [...chart.categories.keys()])
    : scaleFor(chart.x, Math.min(...xs) / 1.12, Math.max(...xs) * 1.12, left, width - right,
      [...new Set(points.map((point) => point.x))]);
  const least = chart.y.logarithmic ? Math.min(...ys.filter((value) => value > 0)) / 1.1 : 0;
  const y = scaleFor(chart.y, least, Math.max(...ys, least * 2, 1e-9) * 1.08, height - bottom, top);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": chart.title });

  for (const mark of y.marks) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }),
      shape("text", { x: left - 8, y: y(mark) + 4, "text-anchor": "end" }, plain(mark)));
  }
  x.marks.forEach((mark) => svg.append(shape("text",
    { x: x(mark), y: height - bottom + 18, "text-anchor": "middle" }, bars ? chart.categories[mark] : plain(mark))));
  svg.append(
    shape("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    shape("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, chart.x.label),
    shape("text", { transform: `translate(14 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" },
      chart.y.label),
  );
  chart.guides.forEach((guide, at) => drawGuide(svg, guide, x(guide.x), at));
  if (bars) chart.series.forEach((series, at) => drawBars(svg, chart, series, x, y, at));
  // What was measured comes last, and so lies above what was predicted.
  for (const mark of ["ideal", "predicted", "simulated", "measured"]) {
    if (!bars) chart.series.filter((series) => series.mark === mark).forEach((one) => drawLine(svg, chart, one, x, y));
  }
  figure.querySelector(".picture").replaceChildren(legendOf(chart), svg);
}

function colourOf(series) {
  return series.mark === "ideal" ? "#8a9099" : groups[series.group % groups.length];
}

function legendOf(chart) {
  const dashes = { simulated: "6 4", predicted: "2 4" };
  return element("ul", { class: "legend" }, ...chart.series.map((series) => element("li", {},
    chart.categories.length ? swatch(colourOf(series)) : shape("svg", { width: 26, height: 10, "aria-hidden": "true" },
      shape("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colourOf(series), "stroke-width": 2,
        "stroke-dasharray": dashes[series.mark] ?? "none" })), series.name)));
}

function drawGuide(svg, guide, x, at) {
  const colour = groups[guide.group % groups.length];
  const { width, height, right, top, bottom } = SIZE;
  const rightward = x < width - right - 130;
  const label = shape("text", { x: x + (rightward ? 5 : -5), y: top + 12 + 15 * at,
    "text-anchor": rightward ? "start" : "end" }, guide.label);
  label.style.fill = colour;
  svg.append(shape("line", { x1: x, x2: x, y1: top, y2: height - bottom, stroke: colour, "stroke-dasharray": "6 4" }),
    label);
}

/** Pixels of a chart within which two points are one to the pointer, which then tells both. */
const NEAR = 6;

/** Give the marks of a point what they tell, to the pointer and to the keyboard. */
function telling(svg, chart, series, point, [x, y], ...marks) {
  const at = chart.categories.length ? chart.categories[point.x] : plain(point.x);
  const pairs = [[chart.x.label, at], [chart.y.label, point.y.toPrecision(4)]];
  if (point.high > point.low) pairs.push(["from, to", `${point.low.toPrecision(4)}, ${point.high.toPrecision(4)}`]);
  pairs.push(...point.told);
  const label = `${series.name}: ${pairs.map((pair) => pair.join(" ")).join("; ")}`;
  const group = shape("g", { tabindex: "0", role: "img", "aria-label": label }, ...marks);
  svg.places ??= [];
  svg.places.push({ group, x, y, name: series.name, value: point.y.toPrecision(4) });
  const show = () => {
    const beside = svg.places.filter((other) => other.group !== group && Math.hypot(other.x - x, other.y - y) < NEAR);
    const box = group.getBoundingClientRect();
    showTip(series.name, [...pairs, ...beside.map((other) => [`also ${other.name}`, other.value])],
      box.right + scrollX - 8, box.top + scrollY);
  };
  for (const event of ["pointerenter", "focus"]) group.addEventListener(event, show);
  for (const event of ["pointerleave", "blur"]) group.addEventListener(event, hideTip);
  svg.append(group);
}

function drawLine(svg, chart, series, x, y) {
  const stroke = colourOf(series);
  const dashes = { simulated: "6 4", predicted: "2 4" }[series.mark] ?? "none";
  const places = series.points.map((point) => `${x(point.x)},${y(point.y)}`).join(" ");
  svg.append(shape("polyline", { points: places, fill: "none", stroke,
    "stroke-width": series.mark === "ideal" ? 1 : 2, "stroke-dasharray": dashes }));
  if (series.mark === "ideal") return;
  for (const point of series.points) {
    const [cx, cy] = [x(point.x), y(point.y)];
    const look = { class: point.hollow ? "mark paper" : "mark", stroke, "stroke-width": 2 };
    if (!point.hollow) look.fill = stroke;
    const mark = series.mark === "simulated"
      ? shape("rect", { ...look, x: cx - 4, y: cy - 4, width: 8, height: 8 })
      : shape("circle", { ...look, cx, cy, r: series.mark === "predicted" ? 1.5 : 4 });
    const range = shape("line", { x1: cx, x2: cx, y1: y(point.low), y2: y(point.high), stroke, "stroke-width": 1.5 });
    const reach = shape("circle", { cx, cy, r: 9, fill: "transparent" });
    telling(svg, chart, series, point, [cx, cy], range, mark, reach);
  }
}

function drawBars(svg, chart, series, x, y, at) {
  const wide = (x(1) - x(0)) * 0.8 / chart.series.length;
  const stroke = colourOf(series);
  for (const point of series.points) {
    const left = x(point.x) + (at - chart.series.length / 2) * wide;
    const look = { class: point.hollow ? "mark paper" : "mark", stroke, "stroke-width": 1.5 };
    if (!point.hollow) look.fill = stroke;
    const middle = left + wide / 2;
    const bar = shape("rect", { ...look, x: left + 2, width: wide - 4, y: y(point.y), height: y(0) - y(point.y) });
    const range = shape("line", { class: "axis", x1: middle, x2: middle, y1: y(point.low), y2: y(point.high) });
    telling(svg, chart, series, point, [middle, y(point.y)], bar, range);
  }
}
