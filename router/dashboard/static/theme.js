// Light, dark or as the system has it; and the colours of the style sheet, for what is drawn on a canvas.
const NAME = "pdserve-theme";
export const THEMES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export const theme = () => localStorage.getItem(NAME) ?? "system";

export function setTheme(name) {
  if (name === "system") localStorage.removeItem(NAME);
  else localStorage.setItem(NAME, name);
  apply();
}

export function apply() {
  const name = theme();
  document.documentElement.dataset.theme = name === "system" ? (system.matches ? "dark" : "light") : name;
  listeners.forEach((listener) => listener());
}

/** Returns what ends it. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** By the names of the style sheet's variables, without the dashes before them. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

system.addEventListener("change", apply);
