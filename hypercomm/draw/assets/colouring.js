// Which groups have which colours: those over some dims, or what becomes of them in a change.

const SPARE = -1; // the group of a slot whose rank the grid does not hold
const PLAIN = -2; // and of one that it holds, while none of its dims is lit

/** A, B, ...: several grids have a group 0 each. */
function letterOf(index) {
  return index < 26 ? String.fromCharCode(65 + index) : `${index}.`;
}

/** Colours for the groups of several grids over the same dims; each grid numbers its own. */
class Colouring {
  constructor(theme, world, grids, dims) {
    this.theme = theme;
    this.dims = dims;
    this.parts = [];
    this.count = 0;
    const groupsOf = grids.map((grid, i) => {
      const own = new Set(grid.own(dims));
      const part = { grid, own, base: this.count, letter: grids.length > 1 ? letterOf(i) : "g" };
      if (own.size) {
        this.parts.push(part);
        this.count += grid.groupCount(own);
      }
      return { part, of: grid.groupOfSlots(own, world) };
    });
    if (groupsOf.length === 1 && this.parts.length === 1) {
      this.groupOf = groupsOf[0].of;
      return;
    }
    this.groupOf = new Int32Array(world.size).fill(SPARE);
    for (const { part, of } of groupsOf) {
      for (let slot = 0; slot < of.length; slot++) {
        if (of[slot] >= 0) this.groupOf[slot] = part.own.size ? part.base + of[slot] : PLAIN;
      }
    }
  }

  /** The grid of a group, and its number there. */
  local(group) {
    const part = this.parts.findLast(({ base }) => base <= group);
    return { ...part, number: group - part.base };
  }

  groupSize(group) {
    const { grid, own } = this.local(group);
    return grid.groupSize(own);
  }

  members(group) {
    const { grid, own, number } = this.local(group);
    return grid.members(number, own);
  }

  fill(group) {
    return this.theme.fill(this.local(group).number);
  }

  sign(group) {
    const { letter, number } = this.local(group);
    return `${letter}${number}`;
  }

  /** The sign, where there is little room. */
  short(group) {
    return String(this.local(group).number);
  }

  name(group) {
    const { grid, own, number } = this.local(group);
    const where = this.parts.length > 1 && grid.name ? ` of ${grid.name}` : "";
    return `${grid.own(own).join("+")} group ${number}${where}`;
  }
}

/** The groups of one side of a change, by what becomes of each: kept, gone or new. */
class ChangeColouring extends Colouring {
  constructor(theme, world, [grid, dims], [other, otherDims], otherwise) {
    super(theme, world, [grid], dims);
    this.otherwise = otherwise;
    this.isKept = new Uint8Array(this.count);
    if (!dims.size || !otherDims.size || grid.groupSize(dims) !== other.groupSize(otherDims))
      return;
    const there = other.groupOfSlots(otherDims, world);
    const [place, placeThere] = [grid.placeOfSlots(dims, world), other.placeOfSlots(otherDims, world)];
    const partner = new Int32Array(this.count).fill(PLAIN);
    this.isKept.fill(1);
    for (let slot = 0; slot < this.groupOf.length; slot++) {
      const group = this.groupOf[slot];
      if (group < 0) continue;
      if (partner[group] === PLAIN) partner[group] = there[slot];
      const isThere = there[slot] >= 0 && partner[group] === there[slot];
      if (!isThere || place[slot] !== placeThere[slot]) this.isKept[group] = 0;
    }
  }

  result(group) {
    return this.isKept[group] ? "kept" : this.otherwise;
  }

  fill(group) {
    return this.theme.palette.results[this.result(group)];
  }

  sign(group) {
    return `${this.short(group)}g${group}`;
  }

  short(group) {
    return this.theme.palette.marks[this.result(group)];
  }

  name(group) {
    return `${super.name(group)} (${this.result(group)})`;
  }
}
