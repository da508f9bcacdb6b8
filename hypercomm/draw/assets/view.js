// The window onto a picture: which part is seen and how large, moved by wheel, drag and buttons.

const MARGIN = 18; // pixels around the whole picture
const LARGEST_CELL = 128; // pixels of a cell, beyond which nothing more is seen
const MOVE_MS = 180;

class View {
  constructor(picture, changed) {
    this.picture = picture;
    this.changed = changed;
    this.flight = null;
    Object.assign(this, { windowWidth: 1, windowHeight: 1 });
    this.fit();
  }

  /** Take a new size: who sees all still does, and who has zoomed in keeps what is in the middle. */
  setWindow(width, height) {
    const { isFit } = this;
    const [x, y] = this.fromPixels(this.windowWidth / 2, this.windowHeight / 2);
    Object.assign(this, { windowWidth: width, windowHeight: height });
    if (isFit) this.fit();
    else
      this.place({
        scale: this.scale,
        x: x - width / 2 / this.scale,
        y: y - height / 2 / this.scale,
      });
  }

  get fitScale() {
    const { width, height, inset } = this.picture;
    return Math.min(
      (this.windowWidth - 2 * MARGIN - inset.left) / width,
      (this.windowHeight - 2 * MARGIN - inset.top) / height,
      LARGEST_CELL,
    );
  }

  get isFit() {
    return Math.abs(this.scale / this.fitScale - 1) < 0.01;
  }

  /** The place that shows all, in the middle. */
  get whole() {
    return this.around(
      { x: 0, y: 0, width: this.picture.width, height: this.picture.height },
      this.fitScale,
    );
  }

  around(box, scale) {
    const { left, top } = this.picture.inset;
    return {
      scale,
      x: box.x + box.width / 2 - (this.windowWidth + left) / 2 / scale,
      y: box.y + box.height / 2 - (this.windowHeight + top) / 2 / scale,
    };
  }

  fit() {
    this.stop();
    Object.assign(this, this.whole);
    this.changed();
  }

  toX(x) {
    return (x - this.x) * this.scale;
  }

  toY(y) {
    return (y - this.y) * this.scale;
  }

  fromPixels(left, top) {
    return [this.x + left / this.scale, this.y + top / this.scale];
  }

  get seen() {
    const [right, bottom] = this.fromPixels(this.windowWidth, this.windowHeight);
    return { left: this.x, top: this.y, right, bottom };
  }

  /** Make all larger by a factor; the point below the pixel stays there. */
  zoom(factor, left = this.windowWidth / 2, top = this.windowHeight / 2) {
    this.stop();
    const [x, y] = this.fromPixels(left, top);
    const scale = clamp(this.scale * factor, this.fitScale, Math.max(LARGEST_CELL, this.fitScale));
    this.place({ scale, x: x - left / scale, y: y - top / scale });
  }

  pan(right, down) {
    this.stop();
    this.place({
      scale: this.scale,
      x: this.x - right / this.scale,
      y: this.y - down / this.scale,
    });
  }

  /** Go to a place, but keep the middle of the window inside the picture. */
  place({ scale, x, y }) {
    const halfWidth = this.windowWidth / 2 / scale;
    const halfHeight = this.windowHeight / 2 / scale;
    this.scale = scale;
    this.x = clamp(x, -halfWidth, this.picture.width - halfWidth);
    this.y = clamp(y, -halfHeight, this.picture.height - halfHeight);
    if (this.isFit) Object.assign(this, this.whole);
    this.changed();
  }

  /** Show a box as large as the window allows, moving there unless motion is unwanted. */
  open(box, largest = LARGEST_CELL) {
    const room = 0.86;
    const scale = Math.min(
      (this.windowWidth * room) / box.width,
      (this.windowHeight * room) / box.height,
      largest,
    );
    this.fly(this.around(box, Math.max(scale, this.fitScale)));
  }

  /** Move no further than needed to see a box whole. */
  reveal(box) {
    const { left, top, right, bottom } = this.seen;
    const rim = 30 / this.scale;
    const x =
      box.x - rim < left ? box.x - rim : Math.max(left, left + box.x + box.width + rim - right);
    const y =
      box.y - rim < top ? box.y - rim : Math.max(top, top + box.y + box.height + rim - bottom);
    if (x !== left || y !== top) this.place({ scale: this.scale, x, y });
  }

  fly(goal) {
    this.stop();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.place(goal);
      return;
    }
    const from = { scale: this.scale, x: this.x, y: this.y };
    const begun = performance.now();
    const step = (now) => {
      const part = clamp((now - begun) / MOVE_MS, 0, 1);
      const eased = part * (2 - part);
      const scale = from.scale * (goal.scale / from.scale) ** eased;
      // The share of the way that keeps the picture from swaying while its scale changes.
      const way =
        from.scale === goal.scale
          ? eased
          : (1 / from.scale - 1 / scale) / (1 / from.scale - 1 / goal.scale);
      this.place({
        scale,
        x: from.x + (goal.x - from.x) * way,
        y: from.y + (goal.y - from.y) * way,
      });
      this.flight = part < 1 ? requestAnimationFrame(step) : null;
    };
    this.flight = requestAnimationFrame(step);
  }

  stop() {
    if (this.flight !== null) cancelAnimationFrame(this.flight);
    this.flight = null;
  }
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), Math.max(most, least));
}

/** Wheel, drag and pinch on the canvas; `pointed` hears where a pointer hovers, `clicked` where it clicks. */
function listenToPointers(canvas, view, { pointed, clicked, left }) {
  const down = new Map(); // pointers that are pressed, by their id
  let travelled = 0;
  let spread = 0;
  const spreadNow = () => {
    const [a, b] = [...down.values()];
    return Math.hypot(a.x - b.x, a.y - b.y);
  };
  const here = (event) => ({ x: event.offsetX, y: event.offsetY });

  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
      if (event.shiftKey) view.pan(-event.deltaY * lines, 0);
      else view.zoom(Math.exp(-event.deltaY * lines * 0.0022), event.offsetX, event.offsetY);
    },
    { passive: false },
  );

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return; // menus and autoscroll are the browser's
    down.set(event.pointerId, here(event));
    travelled = 0;
    if (down.size === 2) spread = Math.max(spreadNow(), 1);
  });

  canvas.addEventListener("pointermove", (event) => {
    // A button that was let go elsewhere, as over a menu, was never heard of here.
    if (!(event.buttons & 1)) down.delete(event.pointerId);
    const before = down.get(event.pointerId);
    const now = here(event);
    if (!before) {
      pointed(now, event);
      return;
    }
    down.set(event.pointerId, now);
    travelled += Math.hypot(now.x - before.x, now.y - before.y);
    if (down.size === 2) {
      const wide = Math.max(spreadNow(), 1); // two fingers in one place would divide by 0
      view.zoom(wide / spread, now.x, now.y);
      spread = wide;
    } else if (travelled > 4) {
      // Only now: a captured pointer would send its click elsewhere.
      if (!canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
      view.pan(now.x - before.x, now.y - before.y);
    }
  });

  const up = (event) => {
    const wasDown = down.delete(event.pointerId);
    if (wasDown && event.type === "pointerup" && travelled <= 4) clicked(here(event), event);
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", left);
}
