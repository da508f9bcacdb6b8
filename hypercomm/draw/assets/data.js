// What the page was given, unpacked; and which ranks the picture has a place for.

const INFLATED = { i: Int32Array, d: Float64Array };

/** An array as `page.py` packed it: differences, deflated, as base64 after a letter for their type. */
async function unpack(text) {
  const bytes = await inflate(text.slice(1));
  const values = new INFLATED[text[0]](bytes);
  for (let i = 1; i < values.length; i++) values[i] += values[i - 1];
  return values;
}

/** A list of names, deflated as JSON. */
async function unpackNames(text) {
  return JSON.parse(new TextDecoder().decode(await inflate(text)));
}

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Sums of one step of each axis, the first axis fastest: `lattice` of axes.py. */
function lattice(sizes, steps, origin = 0) {
  const sums = new Int32Array(sizes.reduce((product, size) => product * size, 1));
  sums[0] = origin;
  let length = 1;
  sizes.forEach((size, axis) => {
    for (let digit = 1; digit < size; digit++) {
      const step = digit * steps[axis];
      for (let i = 0; i < length; i++) sums[digit * length + i] = sums[i] + step;
    }
    length *= size;
  });
  return sums;
}

/** The ranks that have a place in the picture, smallest first: each is at a slot. */
class World {
  /** Without many gaps a slot is a distance from the first rank, else a place in a list. */
  constructor(grids, topologySize) {
    let first = topologySize ? 0 : Infinity;
    let last = topologySize - 1;
    let total = topologySize;
    for (const grid of grids) {
      first = Math.min(first, grid.first);
      last = Math.max(last, grid.last);
      total += grid.size;
    }
    this.first = first;
    this.list = null;
    this.size = last - first + 1;
    if (this.size > 2 * total + 64) {
      const every = new Int32Array(total);
      for (let rank = 0; rank < topologySize; rank++) every[rank] = rank;
      let end = topologySize;
      for (const grid of grids) {
        every.set(grid.ranks(), end);
        end += grid.size;
      }
      this.list = every.sort().filter((rank, i) => i === 0 || rank !== every[i - 1]);
      this.size = this.list.length;
    }
  }

  rankAt(slot) {
    return this.list ? this.list[slot] : this.first + slot;
  }

  /** The slot of a rank, -1 where it has none. */
  slotOf(rank) {
    if (!this.list)
      return rank >= this.first && rank < this.first + this.size ? rank - this.first : -1;
    let low = 0;
    let high = this.list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.list[middle] < rank) low = middle + 1;
      else high = middle;
    }
    return this.list[low] === rank ? low : -1;
  }
}

/** Levels of the machine, innermost first: for each slot the number of its unit, and units' names. */
async function readLevels(scene) {
  const levels = [];
  for (const { name, of, names } of scene.levels) {
    levels.push({ name, of: await unpack(of), names: await unpackNames(names) });
  }
  return levels;
}

async function readGrids(scene) {
  const grids = [];
  for (const given of scene.grids) {
    const listed = given.ranks ? await unpack(given.ranks) : null;
    grids.push(new Grid(given, listed));
  }
  return grids;
}
