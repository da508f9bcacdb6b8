// Where things stand: ranks as cells of size 1, in frames of hosts, in frames of domains, ...

const CELL = -1; // the level of a rank; 0 is the innermost level of units, as in the topology
const PAD = 0.14;
const HEADERS = [0.36, 0.6, 0.9, 1.3, 2]; // of frames at least, from the inside to the outside
const HEADER_SHARE = 0.045; // of a frame's width, so that names grow with what they name
const GAPS = [0, 0.16, 0.36, 0.8, 1.6, 3]; // between cells, hosts, domains, ...
const ROOM_FOR_ARROWS = 0.08; // of a module's width, between modules

class Boxes {
  /** Units of a level all get the room of the largest, so that a place is found by division. */
  constructor(levels, slots, aspect) {
    this.levels = levels;
    this.slots = slots;
    this.roomy = null; // the level of what has arrows between its units
    this.top = levels.length; // the level of the picture itself, which has one unit
    this.parents = levels.map((_, level) => this.parentsOf(level));
    this.kids = [];
    for (let level = 0; level <= this.top; level++) this.kids.push(this.kidsOf(level));
    this.arrange(aspect);
  }

  count(level) {
    if (level === CELL) return this.slots;
    return level === this.top ? 1 : this.levels[level].names.length;
  }

  /** The unit of the next level that holds a unit: the one that holds its first rank. */
  parentsOf(level) {
    const outer = this.levels[level + 1];
    const parents = new Int32Array(this.levels[level].names.length);
    if (!outer) return parents;
    const { of } = this.levels[level];
    for (let slot = this.slots - 1; slot >= 0; slot--) parents[of[slot]] = outer.of[slot];
    return parents;
  }

  parentOf(level, index) {
    if (level === CELL) return this.top === 0 ? 0 : this.levels[0].of[index];
    return this.parents[level][index];
  }

  /** For each unit of a level what it holds, one behind the other: `start` says where each begins. */
  kidsOf(level) {
    const count = this.count(level - 1);
    const start = new Int32Array(this.count(level) + 1);
    for (let kid = 0; kid < count; kid++) start[this.parentOf(level - 1, kid) + 1]++;
    let most = 0;
    for (let unit = 1; unit < start.length; unit++) {
      most = Math.max(most, start[unit]);
      start[unit] += start[unit - 1];
    }
    const next = start.slice(0, -1);
    const list = new Int32Array(count);
    const turn = new Int32Array(count); // which kid of its parent each is
    for (let kid = 0; kid < count; kid++) {
      const parent = this.parentOf(level - 1, kid);
      turn[kid] = next[parent] - start[parent];
      list[next[parent]++] = kid;
    }
    return { start, list, turn, most };
  }

  /** Choose the number of columns of each level; the picture's own by the shape of the window. */
  arrange(aspect) {
    this.frames = [];
    let [width, height] = [1, 1];
    for (let level = 0; level <= this.top; level++) {
      const isTop = level === this.top;
      const isAlone = this.count(level) === 1; // it fills the window, as the picture does
      const room = level - 1 === this.roomy ? ROOM_FOR_ARROWS * width : 0;
      const gap = Math.max(GAPS[Math.min(level, GAPS.length - 1)], room);
      const [stepX, stepY] = [width + gap, height + gap];
      const columns = columnsFor(
        this.kids[level].most,
        stepX,
        stepY,
        isAlone ? aspect : 1.7,
        isTop,
      );
      const rows = Math.ceil(this.kids[level].most / columns);
      const least = HEADERS[Math.min(level, HEADERS.length - 1)];
      const header = isTop ? 0 : Math.max(least, HEADER_SHARE * columns * stepX);
      const pad = isTop ? 0 : PAD * (1 + level);
      this.frames.push({ columns, stepX, stepY, header, pad, kidWidth: width, kidHeight: height });
      width = columns * stepX - gap + 2 * pad;
      height = rows * stepY - gap + 2 * pad + header;
    }
    this.width = width;
    this.height = height;
    this.corners = this.levels.map(() => null);
    for (let level = this.top - 1; level >= 0; level--) this.corners[level] = this.cornersOf(level);
  }

  cornersOf(level) {
    const count = this.count(level);
    const x = new Float64Array(count);
    const y = new Float64Array(count);
    for (let unit = 0; unit < count; unit++) [x[unit], y[unit]] = this.corner(level, unit);
    return { x, y };
  }

  corner(level, index) {
    const known = level >= 0 && level < this.top && this.corners[level];
    if (known) return [known.x[index], known.y[index]];
    if (level === this.top) return [0, 0];
    const [x, y] = this.corner(level + 1, this.parentOf(level, index));
    const frame = this.frames[level + 1];
    const turn = this.kids[level + 1].turn[index];
    return [
      x + frame.pad + (turn % frame.columns) * frame.stepX,
      y + frame.pad + frame.header + Math.floor(turn / frame.columns) * frame.stepY,
    ];
  }

  box(level, index) {
    const [x, y] = this.corner(level, index);
    const { kidWidth: width, kidHeight: height } = this.sizes(level);
    return { x, y, width, height };
  }

  sizes(level) {
    return level === this.top
      ? { kidWidth: this.width, kidHeight: this.height }
      : this.frames[level + 1];
  }

  /** What stands at a point, no finer than a level: {level, index}, or null. */
  at(x, y, finest) {
    if (x < 0 || y < 0 || x >= this.width || y >= this.height) return null;
    let spot = { level: this.top, index: 0 };
    while (spot.level > finest) {
      const [left, top] = this.corner(spot.level, spot.index);
      const frame = this.frames[spot.level];
      if (y < top + frame.header) break; // its name
      // A gap belongs to what is before it, so that a pointer on its way lights nothing in between.
      const column = clamp(Math.floor((x - left - frame.pad) / frame.stepX), 0, frame.columns - 1);
      const row = Math.max(0, Math.floor((y - top - frame.pad - frame.header) / frame.stepY));
      const { start, list } = this.kids[spot.level];
      const kid = start[spot.index] + row * frame.columns + column;
      if (kid >= start[spot.index + 1]) break;
      spot = { level: spot.level - 1, index: list[kid] };
    }
    return spot.level === this.top ? null : spot;
  }

  /** What some units hold, of which a part is within `seen`; null once there are more than `limit`. */
  within(level, units, seen, limit) {
    const { start, list } = this.kids[level];
    const frame = this.frames[level];
    const found = [];
    for (const unit of units) {
      const [x, y] = this.corner(level, unit);
      const count = start[unit + 1] - start[unit];
      const left = x + frame.pad;
      const top = y + frame.pad + frame.header;
      const from = Math.max(0, Math.floor((seen.left - left) / frame.stepX));
      const to = Math.min(frame.columns, Math.ceil((seen.right - left) / frame.stepX));
      const last = Math.min(
        Math.ceil(count / frame.columns),
        Math.ceil((seen.bottom - top) / frame.stepY),
      );
      for (let row = Math.max(0, Math.floor((seen.top - top) / frame.stepY)); row < last; row++) {
        for (let column = from; column < to; column++) {
          const turn = row * frame.columns + column;
          if (turn < count) found.push(list[start[unit] + turn]);
        }
        if (found.length > limit) return null;
      }
    }
    return found;
  }

  /** Visit the slots that a unit holds, however many levels down. */
  forEachSlot(level, index, visit) {
    if (level === CELL) {
      visit(index);
      return;
    }
    const { start, list } = this.kids[level];
    for (let place = start[index]; place < start[index + 1]; place++) {
      this.forEachSlot(level - 1, list[place], visit);
    }
  }
}

/** Columns that make the shape nearest to an aspect, with few empty places. */
function columnsFor(count, width, height, aspect, isTop) {
  let best = 1;
  let least = Infinity;
  const most = Math.min(count, 4096);
  for (let columns = 1; columns <= most; columns++) {
    const rows = Math.ceil(count / columns);
    const shape = Math.abs(Math.log((columns * width) / (rows * height) / aspect));
    const empty = (columns * rows - count) / (columns * rows);
    const isRound = !isTop || count <= 16 || columns % 4 === 0 ? 0 : 0.35;
    const cost = shape + (isTop ? 0.8 : 6) * empty + isRound;
    if (cost < least) [best, least] = [columns, cost];
  }
  return best;
}
