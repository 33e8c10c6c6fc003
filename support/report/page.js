// What the curves say under the pointer. The page is whole without it.
"use strict";

// between a place in the picture and the number that an axis has there
const axisOf = (text) => {
  const [low, high, log, begin, end] = text.split(" ").map(Number);
  const [from, to] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  return (place) => {
    const value = from + ((place - begin) / (end - begin)) * (to - from);
    return log ? 10 ** value : value;
  };
};

const short = (value) => {
  const power = Math.abs(value) < 10000 ? 0 : Math.min(Math.floor(Math.log10(Math.abs(value)) / 3), 6);
  return `${Number((value / 1000 ** power).toPrecision(4))} ${["", "K", "M", "G", "T", "P", "E"][power]}`.trim();
};

for (const figure of document.querySelectorAll("figure")) {
  const plot = figure.querySelector(".plot");
  const readout = figure.querySelector(".readout");
  const cursor = plot.querySelector(".cursor");
  const [xAt, yAt] = [axisOf(plot.dataset.x), axisOf(plot.dataset.y)];
  const curves = [...plot.querySelectorAll("polyline")].map((line) => ({
    label: line.dataset.label.replaceAll("`", ""),
    points: line.getAttribute("points").split(" ").map((point) => point.split(",").map(Number)),
  }));

  const show = (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    const closer = (far) => (a, b) => (far(b) < far(a) ? b : a);
    const near = curves.map((curve) => ({ ...curve, at: curve.points.reduce(closer((p) => Math.abs(p[0] - x))) }));
    if (!near.length) return;
    // of many curves the one under the pointer
    const nearest = near.reduce(closer((curve) => Math.hypot(curve.at[0] - x, curve.at[1] - y)));
    const shown = near.length > 3 ? [nearest] : near;
    cursor.setAttribute("x1", nearest.at[0]);
    cursor.setAttribute("x2", nearest.at[0]);
    cursor.style.visibility = "visible";
    const values = shown.map((curve) => `${curve.label} ${short(yAt(curve.at[1]))}`);
    readout.textContent = `at ${short(xAt(nearest.at[0]))} ${plot.dataset.xUnit}: ${values.join(", ")}`;
  };
  const area = figure.querySelector("svg.chart");
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    readout.textContent = "";
  });
}
