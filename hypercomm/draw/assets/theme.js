// Light and dark: the colours that the style sheet has, and the groups' own, from palette.py.

const THEMES = ["auto", "light", "dark"];
const INK_ON_FILL = "#16181d"; // every fill is light enough for dark labels, in both themes

class Theme {
  constructor(palette) {
    this.palette = palette;
    this.choice = "auto";
    this.read();
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "frame", "edge", "ink", "faint", "spare", "plain", "focus"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.isDark = style.getPropertyValue("--is-dark").trim() === "1";
    this.font = style.fontFamily;
  }

  next() {
    this.choice = THEMES[(THEMES.indexOf(this.choice) + 1) % THEMES.length];
    if (this.choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.choice;
    this.read();
  }

  fill(group) {
    return this.palette.fills[group % this.palette.fills.length];
  }

  /** The shade of an amount and the ink on it: more is darker, but in the dark lighter. */
  shade(amount, largest) {
    const { amounts } = this.palette;
    const step = Math.min(
      amounts.length - 1,
      Math.floor((amount * amounts.length) / Math.max(largest, 1)),
    );
    const index = this.isDark ? amounts.length - 1 - step : step;
    return { fill: amounts[index], ink: index < 4 ? INK_ON_FILL : "#ffffff" };
  }
}
