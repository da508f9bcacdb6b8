// Arrows between the modules of a pipeline: from the frame of one to that of the one it sends to.

const TIP = 11; // pixels

/** The level of the modules' frames; null where hosts or domains are the frames. */
function levelOfModules(levels) {
  const level = levels.findIndex(({ name, isGuess }) => isGuess && name === "module");
  return level < 0 ? null : level;
}

/** The way of each arrow, in the picture's own measure. */
function waysOf(edges, { boxes }) {
  const level = boxes.roomy;
  if (level === null) return [];
  const { pad, header } = boxes.frames[level];
  const { stepX, stepY, kidWidth } = boxes.frames[level + 1];
  const gap = stepX - kidWidth;
  const pairs = edges.map((edge) => edge.map((module) => boxes.box(level, module)));
  const areNear = ([here, there]) =>
    here.y === there.y && Math.abs(there.x - here.x) < here.width + 1.5 * gap;
  const isFar = ([here, there]) => Math.abs(there.y - here.y) > 1.5 * stepY; // passes rows
  const laneIn = (pair, those) => (gap * (those.indexOf(pair) + 1)) / (those.length + 1);
  const around = pairs.filter((pair) => !areNear(pair));
  const far = pairs.filter(isFar);
  return pairs.map((pair) => {
    if (areNear(pair)) return straight(...pair, pad, header);
    const turn = around.indexOf(pair);
    const beside = isFar(pair) ? laneIn(pair, far) : null;
    return alongGaps(...pair, pad, header, gap, { turn, lane: laneIn(pair, around), beside });
  });
}

/** To the next one at the height of the names, to the one before below the cells. */
function straight(here, there, pad, header) {
  const tail = Math.min(1.2, here.width * 0.3);
  if (there.x > here.x) {
    const y = here.y + (pad + header * 0.62) * 0.86;
    return [
      [there.x - tail, y],
      [there.x, y],
    ];
  }
  const y = here.y + here.height - pad / 2;
  return [
    [here.x + tail, y],
    [there.x + there.width, y],
  ];
}

/**
 * Out of one frame, along the gap between two rows, and into the other; past further rows along the
 * gap beside their frames. Each has a lane in a gap.
 */
function alongGaps(here, there, pad, header, gap, { turn, lane, beside }) {
  const isDown = there.y > here.y;
  const isBelow = there.y >= here.y; // of frames in one row the arrow runs below
  const foot = here.y + here.height;
  const aside = 0.06 * (turn % 5) * here.width;
  const out = here.x + here.width * 0.3 + aside;
  const into = there.x + there.width * 0.62 + aside;
  const start = isBelow ? foot - pad / 2 : here.y + header / 2;
  const first = isBelow ? foot + lane : here.y - gap + lane;
  const before = isDown ? there.y - gap + lane : there.y + there.height + lane;
  const last = isDown ? there.y + header * 0.7 : there.y + there.height - pad / 2;
  const side = Math.min(here.x, there.x) + here.width + beside;
  const past =
    beside === null
      ? []
      : [
          [side, first],
          [side, before],
        ];
  return [[out, start], [out, first], ...past, [into, before], [into, last]];
}

function paintArrows({ ctx, theme }, view, ways) {
  const arrows = ways.map((way) => shapeOf(way.map(([x, y]) => [view.toX(x), view.toY(y)])));
  ctx.lineJoin = "round";
  ctx.fillStyle = theme.ink;
  for (const { line } of arrows) {
    stroke(ctx, line, theme.paper, 6); // a rim, as frames have edges of their own
    stroke(ctx, line, theme.ink, 2.5);
  }
  for (const { head } of arrows) {
    stroke(ctx, head, theme.paper, 3); // after the lines, so that none cuts a head off
    ctx.fill(head);
  }
}

/** A way in pixels as a line and the head at its end. */
function shapeOf(points) {
  const [x, y] = points.pop();
  const [beforeX, beforeY] = points.at(-1);
  const length = Math.hypot(x - beforeX, y - beforeY) || 1;
  const tip = Math.min(TIP, length);
  const [alongX, alongY] = [((x - beforeX) / length) * tip, ((y - beforeY) / length) * tip];
  const line = new Path2D();
  for (const point of points) line.lineTo(...point);
  line.lineTo(x - alongX, y - alongY);
  const head = new Path2D();
  head.moveTo(x, y);
  head.lineTo(x - alongX - alongY * 0.55, y - alongY + alongX * 0.55);
  head.lineTo(x - alongX + alongY * 0.55, y - alongY - alongX * 0.55);
  head.closePath();
  return { line, head };
}

function stroke(ctx, path, colour, width) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.stroke(path);
}
