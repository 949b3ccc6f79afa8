"use strict";

/* Numbers as people read them, and elements made of texts; nothing is ever parsed as HTML. */

/** Return an element with attributes and children; children that are strings become texts. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return an SVG element. */
function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return a function that tells nanoseconds in the unit that fits a whole of some length. */
function clockFor(whole) {
  const [scale, unit] = whole < 1e7 ? [1e3, "\u00b5s"] : whole < 1e11 ? [1e6, "ms"] : [1e9, "s"];
  const tell = (time) => `${(time / scale).toFixed(3)} ${unit}`;
  return Object.assign(tell, { scale, unit });
}

/** Tell a count with a separator between thousands. */
function counted(number) {
  return number === null ? "-" : String(number).replace(/\B(?=(\d{3})+(?!\d))/g, "\u2009");
}

/** Tell bytes in MB of 1e6 bytes. */
function megabytes(nbytes) {
  return nbytes === null ? "-" : `${(nbytes / 1e6).toFixed(3)} MB`;
}

/** Tell FLOPs in some nanoseconds as GFLOP/s. */
function rate(flops, time) {
  return flops === null || !(time > 0) ? "-" : `${(flops / time).toFixed(1)} GFLOP/s`;
}

/** Return round values between two, about as many as asked for. */
function ticks(low, high, about) {
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-9); at++) found.push(at * step);
  return found;
}

/** Tell a value without digits that say nothing. */
function plain(value) {
  return String(Number(value.toPrecision(6)));
}
