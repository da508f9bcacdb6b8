// One layout as cells in frames: what is seen at this zoom, what stands where, who is in whose group.

const MOST_SEEN = 1100; // units or ranks that are drawn one by one, unless the reader asks for more
const LEAST_PIXELS = 7; // of a rank that is drawn
const LEAST_HEIGHT = 15; // of a unit that stands for its ranks: it has room for its name
const MOST_FORCED = 300000;

class CellPicture {
  constructor(world, levels, aspect = 1.6) {
    this.world = world;
    this.levels = levels;
    this.boxes = new Boxes(levels, world.size, aspect);
    this.detail = "auto";
    this.inset = { left: 0, top: 0 };
    this.shown = { level: CELL, list: [], outer: [] };
  }

  get width() {
    return this.boxes.width;
  }

  get height() {
    return this.boxes.height;
  }

  arrange(aspect) {
    this.boxes.arrange(aspect);
  }

  /** Which groups have colours: `groupOf` for each slot, the colour and the sign of each. */
  colour(colouring) {
    this.colouring = colouring;
    this.heldBy = new Map();
  }

  /** Take the finest level of which few enough are in the window and each is large enough. */
  look(view) {
    const { boxes, detail } = this;
    const { seen, scale } = view;
    let list = [0];
    let level = boxes.top;
    const outer = [];
    const finest = detail === "auto" ? CELL : detail;
    while (level > finest) {
      const isFirst = level === boxes.top;
      const size =
        Math.min(boxes.sizes(level - 1).kidWidth, boxes.sizes(level - 1).kidHeight) * scale;
      const least = level - 1 === CELL ? LEAST_PIXELS : LEAST_HEIGHT;
      const isTooSmall = size < (detail === "auto" ? least : 1);
      if (!isFirst && isTooSmall) break;
      const limit = isFirst ? Infinity : detail === "auto" ? MOST_SEEN : MOST_FORCED;
      const kids = boxes.within(level, list, seen, limit);
      if (!kids) break;
      if (!isFirst) outer.push({ level, list });
      list = kids;
      level -= 1;
    }
    this.shown = { level, list, outer };
  }

  at(x, y) {
    const spot = this.boxes.at(x, y, this.shown.level);
    return spot && { ...spot, pane: this };
  }

  box(spot) {
    return this.boxes.box(spot.level, spot.index);
  }

  /** The groups of what a unit holds, each with how many of its ranks are in here; -1 is no group. */
  held(level, index) {
    const key = level * 2 ** 32 + index;
    if (!this.heldBy.has(key)) {
      const groups = new Map();
      this.boxes.forEachSlot(level, index, (slot) => {
        const group = this.colouring.groupOf[slot];
        groups.set(group, (groups.get(group) ?? 0) + 1);
      });
      this.heldBy.set(key, groups);
    }
    return this.heldBy.get(key);
  }

  /** Whether some group has ranks both in a unit and outside of it. */
  isLeft(level, index) {
    for (const [group, count] of this.held(level, index)) {
      if (group >= 0 && count < this.colouring.groupSize(group)) return true;
    }
    return false;
  }

  groupsAt(spot) {
    if (spot.level === CELL) {
      const group = this.colouring.groupOf[spot.index];
      return group < 0 ? [] : [group];
    }
    return [...this.held(spot.level, spot.index).keys()].filter((group) => group >= 0);
  }

  /** What is lit for some groups: cells or units of the level that is shown. */
  spotsOf(groups) {
    const { groupOf } = this.colouring;
    const isLit = new Set(groups);
    const { level, list } = this.shown;
    if (level === CELL) {
      if (isLit.size === 1) {
        const [group] = isLit;
        return this.colouring.members(group).map((rank) => this.world.slotOf(rank));
      }
      return list.filter((slot) => isLit.has(groupOf[slot]));
    }
    const wanted = new Uint8Array(this.colouring.count);
    for (const group of isLit) wanted[group] = 1;
    const inUnit = new Uint8Array(this.boxes.count(level));
    const { of } = this.levels[level];
    for (let slot = 0; slot < groupOf.length; slot++) {
      if (groupOf[slot] >= 0 && wanted[groupOf[slot]]) inUnit[of[slot]] = 1;
    }
    return list.filter((unit) => inUnit[unit]);
  }

  /** The next spot in a direction, across gaps and frames: the first that is hit on the way. */
  step(spot, right, down) {
    const box = this.box(spot);
    const step = Math.min(box.width, box.height, 1) / 2;
    const reach = Math.max(this.width, this.height);
    let [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    for (let way = 0; way < reach; way += step) {
      x += right * step;
      y += down * step;
      if (x < 0 || y < 0 || x > this.width || y > this.height) break;
      const next = this.at(x, y);
      if (next && next.level === spot.level && next.index !== spot.index) return next;
    }
    return spot;
  }

  /** The spot, or the unit around it where ranks are not drawn one by one. */
  visible(spot) {
    return spot.level < this.shown.level ? this.adapt(spot) : spot;
  }

  /** A spot at the level that is shown: the unit around it, or the first thing inside of it. */
  adapt(spot) {
    let { level, index } = spot;
    while (level < this.shown.level) index = this.boxes.parentOf(level++, index);
    while (level > this.shown.level) {
      const { start, list } = this.boxes.kids[level--];
      index = list[start[index]];
    }
    return { pane: this, level, index };
  }

  first() {
    return this.adapt({ level: this.boxes.top, index: 0 });
  }

  /** How many groups over the coloured dims leave a unit of a level. */
  crossing(level) {
    const { groupOf, count } = this.colouring;
    const unit = new Int32Array(count).fill(-1);
    const crosses = new Uint8Array(count);
    const { of } = this.levels[level];
    for (let slot = 0; slot < groupOf.length; slot++) {
      const group = groupOf[slot];
      if (group < 0) continue;
      if (unit[group] < 0) unit[group] = of[slot];
      else if (unit[group] !== of[slot]) crosses[group] = 1;
    }
    return crosses.reduce((sum, one) => sum + one, 0);
  }
}
