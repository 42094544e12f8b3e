// Elements and numbers. Every text is set by textContent, so a name can never become markup.

const page = document.getElementById("page");

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

// A mark in a colour, given by its name in the style sheet; without a colour, styled by a class.
function swatch(colour, kind = "") {
  const node = element("span", { class: "swatch " + kind });
  if (colour !== null) node.style.background = `var(--${colour})`;
  return node;
}

const hint = (text) => element("p", { class: "hint" }, text);

// A card: title, picture, and a folded explanation.
function card(key) {
  const { title, healthy, otherwise } = content.words[key];
  const picture = element("div", { class: "picture" });
  const words = element("details", { class: "words" }, element("summary", {}, "Healthy, and otherwise"), element("p", {}, healthy), element("p", {}, otherwise));
  const node = element("section", { class: "card", id: key }, element("h2", {}, title), picture, words);
  return { node, picture };
}

const whole = (number) => number.toLocaleString("en-US");
const atStep = (step) => "step " + whole(step);
const stepRange = (first, last) => (first === last ? atStep(last) : `steps ${whole(first)}–${whole(last)}`);

// 0.0123, 12.3, 1.23e-7: three digits, in a form that can be copied into a terminal.
function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === Infinity) return "Inf";
  if (value === -Infinity) return "-Inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return whole(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// Axis labels: 10⁻⁴ and 5·10⁻⁴ where 0.0001 would be too long.
function formatTick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-2 && size < 1e4) return String(Number(value.toPrecision(6)));
  const [mantissa, exponent] = value.toExponential(4).split("e");
  const power = "10" + [...String(Number(exponent))].map((digit) => SUPERSCRIPTS[digit]).join("");
  const factor = String(Number(mantissa));
  return factor === "1" ? power : factor === "-1" ? "-" + power : factor + "·" + power;
}

function formatShare(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const percent = value * 100;
  return (percent === 0 || percent >= 10 ? percent.toFixed(0) : percent.toPrecision(2)) + " %";
}

const formatShareTick = (value) => Number((value * 100).toPrecision(6)) + " %";

// Shorten a name to fit a label: its end says more than its beginning, from the first module that fits.
function shorten(name, length) {
  if (name.length <= length) return name;
  const end = name.slice(name.length - Math.max(length - 1, 1));
  return "…" + end.replace(/^[^./]{1,12}[./](?=.)/, "");
}

const plural = (count, one, many = one + "s") => whole(count) + " " + (count === 1 ? one : many);

// Ticks at 1, 2 or 5 times a power of ten.
function linearTicks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : Number(tick.toPrecision(12)));
  }
  return ticks;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
