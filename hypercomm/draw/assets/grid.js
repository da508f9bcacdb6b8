// The arithmetic of a layout: coordinates, ranks and groups, of one rank at a time.

class Grid {
  constructor({ name, dims, shape, strides, offset }, listed) {
    Object.assign(this, { name, dims, shape, strides, offset, listed });
    this.size = shape.reduce((product, size) => product * size, 1);
    this.first = offset;
    this.last = offset + shape.reduce((sum, size, axis) => sum + (size - 1) * strides[axis], 0);
    this.positions = null;
    if (listed) {
      this.positions = new Map();
      listed.forEach((rank, position) => this.positions.set(rank, position));
      this.last = listed.reduce((most, rank) => Math.max(most, rank), 0);
    }
    this.memory = new Map(); // the groups of each slot, by dims: the last few that were shown
  }

  get title() {
    return this.dims.map((dim, axis) => `${dim}=${this.shape[axis]}`).join(",");
  }

  /** All ranks in the order of positions; the first dim varies fastest. */
  ranks() {
    return this.listed ?? lattice(this.shape, this.strides, this.offset);
  }

  rankAt(coords) {
    const offset = coords.reduce((sum, digit, axis) => sum + digit * this.strides[axis], 0);
    return this.listed ? this.listed[offset] : this.offset + offset;
  }

  /** The coordinates of a rank; null where it is not held. */
  coordsOf(rank) {
    let rest = this.listed ? (this.positions.get(rank) ?? -1) : rank - this.offset;
    const coords = new Array(this.shape.length);
    for (let axis = this.shape.length - 1; axis >= 0; axis--) {
      coords[axis] = Math.floor(rest / this.strides[axis]);
      if (coords[axis] < 0 || coords[axis] >= this.shape[axis]) return null;
      rest -= coords[axis] * this.strides[axis];
    }
    return rest === 0 ? coords : null;
  }

  /** Those of these dims that the grid has, in its order. */
  own(dims) {
    return this.dims.filter((dim) => dims.has(dim));
  }

  groupSize(dims) {
    return this.shape.reduce(
      (product, size, axis) => product * (dims.has(this.dims[axis]) ? size : 1),
      1,
    );
  }

  groupCount(dims) {
    return this.size / this.groupSize(dims);
  }

  /** The number of the group over dims that holds these coordinates: the other dims, first fastest. */
  groupAt(coords, dims) {
    let group = 0;
    let count = 1;
    this.shape.forEach((size, axis) => {
      if (dims.has(this.dims[axis])) return;
      group += coords[axis] * count;
      count *= size;
    });
    return group;
  }

  /** The ranks of a group, in the order of its dims; the first dim varies fastest. */
  members(group, dims) {
    const coords = this.shape.map((size, axis) => {
      if (dims.has(this.dims[axis])) return 0;
      const digit = group % size;
      group = Math.floor(group / size);
      return digit;
    });
    const inner = this.shape.map((_, axis) => axis).filter((axis) => dims.has(this.dims[axis]));
    const ranks = [];
    for (;;) {
      ranks.push(this.rankAt(coords));
      const axis = inner.find(
        (each) => ++coords[each] < this.shape[each] || ((coords[each] = 0), false),
      );
      if (axis === undefined) return ranks;
    }
  }

  /** For each slot of the world the number of its group, -1 outside of the grid. */
  groupOfSlots(dims, world) {
    const key = this.own(dims).join("+");
    if (this.memory.has(key)) return this.memory.get(key);
    let count = 1;
    const steps = this.shape.map((size, axis) => {
      if (dims.has(this.dims[axis])) return 0;
      const step = count;
      count *= size;
      return step;
    });
    const groups = lattice(this.shape, steps);
    const ranks = this.ranks();
    const ofSlots = new Int32Array(world.size).fill(-1);
    for (let i = 0; i < ranks.length; i++) ofSlots[world.slotOf(ranks[i])] = groups[i];
    if (this.memory.size > 8) this.memory.clear();
    this.memory.set(key, ofSlots);
    return ofSlots;
  }

  /** For each slot its place in its group: what the other dims' groups are counted by. */
  placeOfSlots(dims, world) {
    return this.groupOfSlots(new Set(this.dims.filter((dim) => !dims.has(dim))), world);
  }
}

/** Every combination of the dims that are larger than 1, few dims first, up to six of them. */
function combinations(grid) {
  const long = grid.dims.filter((_, axis) => grid.shape[axis] > 1).slice(0, 6);
  const every = [];
  for (let mask = 1; mask < 2 ** long.length; mask++) {
    every.push(long.filter((_, bit) => mask & (1 << bit)));
  }
  return every.sort((a, b) => a.length - b.length);
}
