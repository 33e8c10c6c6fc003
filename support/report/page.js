// What the curves say under the pointer. The page is whole without it.
"use strict";

const axisOf = (text) => {
  const [low, high, log] = text.split(" ").map(Number);
  const [from, to] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  return (share) => (log ? 10 ** (from + share * (to - from)) : from + share * (to - from));
};

const short = (value) => {
  const power = Math.abs(value) < 10000 ? 0 : Math.min(Math.floor(Math.log10(Math.abs(value)) / 3), 6);
  return `${Number((value / 1000 ** power).toPrecision(4))} ${["", "K", "M", "G", "T", "P", "E"][power]}`.trim();
};

for (const figure of document.querySelectorAll("figure")) {
  const plot = figure.querySelector("svg.plot");
  if (!plot) continue;
  const readout = figure.querySelector(".readout");
  const cursor = plot.querySelector(".cursor");
  const [xAt, yAt] = [axisOf(plot.dataset.x), axisOf(plot.dataset.y)];
  const curves = [...plot.querySelectorAll("polyline")].map((line) => ({
    label: line.dataset.label,
    isBand: line.classList.contains("band"), // there and back again
    points: line.getAttribute("points").split(" ").map((point) => point.split(",").map((n) => n / 1000)),
  }));

  const say = ({ label, isBand, points, at }) => {
    const opposite = points[points.length - 1 - points.indexOf(at)];
    const lowest = isBand ? `${short(yAt(1 - opposite[1]))} to ` : "";
    return `${label.replaceAll("`", "")} ${lowest}${short(yAt(1 - at[1]))}`;
  };

  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const closer = (far) => (a, b) => (far(b) < far(a) ? b : a);
    const found = curves.map((curve) => ({ ...curve, at: curve.points.reduce(closer((p) => Math.abs(p[0] - x))) }));
    if (!found.length) return;
    // of many curves the one under the pointer
    const nearest = found.reduce(closer((c) => Math.hypot(c.at[0] - x, c.at[1] - y)));
    const told = found.length > 3 ? [nearest] : found;
    cursor.setAttribute("x1", `${nearest.at[0] * 100}%`);
    cursor.setAttribute("x2", `${nearest.at[0] * 100}%`);
    cursor.style.visibility = "visible";
    readout.textContent = `at ${short(xAt(nearest.at[0]))} ${figure.dataset.xUnit}: ${told.map(say).join(", ")}`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    readout.textContent = "";
  });
}
