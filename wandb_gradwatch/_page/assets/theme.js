// Light and dark theme, and the colours of the style sheet by name.

const NUM_LINE_COLOURS = 8; // --line-0 to --line-7 in the style sheet

// Colour anchors from low to high; lightness rises (sequential) or falls on both sides of the middle (diverging).
const SEQUENTIAL = [[22, 20, 62], [44, 52, 128], [28, 104, 142], [30, 148, 132], [98, 187, 92], [196, 213, 74], [253, 240, 160]];
const DIVERGING_LIGHT = [[28, 62, 140], [72, 124, 189], [160, 195, 222], [243, 241, 234], [240, 184, 140], [214, 105, 62], [140, 36, 26]];
const DIVERGING_DARK = [[126, 178, 255], [64, 112, 190], [38, 62, 100], [32, 36, 40], [104, 58, 34], [196, 98, 48], [255, 176, 112]];
const DENSITY_LIGHT = [[255, 254, 251], [160, 205, 205], [30, 120, 130], [22, 20, 62]];
const DENSITY_DARK = [[23, 28, 32], [28, 84, 110], [48, 160, 150], [253, 240, 160]];

const darkByDefault = window.matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;

const isDark = () => (chosenTheme === null ? darkByDefault.matches : chosenTheme === "dark");

function showTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  knownColours.clear();
}

function chooseTheme(chosen) {
  chosenTheme = chosen;
  showTheme();
  announce("theme");
}

darkByDefault.addEventListener("change", () => chooseTheme(chosenTheme));

// Cached until the theme changes: reading a computed style makes the browser lay out the page again.
const knownColours = new Map();

function colour(name) {
  if (!knownColours.has(name)) knownColours.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
  return knownColours.get(name);
}

showTheme();

const lineColour = (index) => `line-${index % NUM_LINE_COLOURS}`;
const levelColour = (level) => colour(level === "ERROR" ? "error" : level === "WARN" ? "warn" : "info");

function gradient(kind) {
  const pairs = { diverging: [DIVERGING_LIGHT, DIVERGING_DARK], density: [DENSITY_LIGHT, DENSITY_DARK] };
  return pairs[kind]?.[Number(isDark())] ?? SEQUENTIAL;
}

// Return the colour at a position between 0 and 1, as [r, g, b].
function colourAt(anchors, place) {
  const position = clamp(place, 0, 1) * (anchors.length - 1);
  const left = Math.min(Math.floor(position), anchors.length - 2);
  const part = position - left;
  return anchors[left].map((channel, index) => Math.round(channel + part * (anchors[left + 1][index] - channel)));
}

function packColour([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0; // the byte order of ImageData on every browser's machine
}

function packHex(hex) {
  const value = parseInt(hex.slice(1), 16);
  return packColour([value >> 16, (value >> 8) & 255, value & 255]);
}
