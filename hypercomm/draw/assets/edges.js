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
  const gap = boxes.frames[level + 1].stepX - boxes.sizes(level).kidWidth;
  const pairs = edges.map((edge) => edge.map((module) => boxes.box(level, module)));
  const areNear = ([here, there]) =>
    here.y === there.y && Math.abs(there.x - here.x) < here.width + 1.5 * gap;
  const around = pairs.filter((pair) => !areNear(pair));
  return pairs.map((pair) =>
    areNear(pair)
      ? straight(...pair, pad, header)
      : alongGap(...pair, pad, header, gap, around.indexOf(pair), around.length),
  );
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

/** Out of one frame, along the gap between two rows, and into the other; each has a lane there. */
function alongGap(here, there, pad, header, gap, turn, turns) {
  const isDown = there.y > here.y;
  const isBelow = there.y >= here.y; // of frames in one row the arrow runs below
  const foot = here.y + here.height;
  const lane = (gap * (turn + 1)) / (turns + 1);
  const aside = 0.06 * (turn % 5) * here.width;
  const out = here.x + here.width * 0.3 + aside;
  const into = there.x + there.width * 0.62 + aside;
  const start = isBelow ? foot - pad / 2 : here.y + header / 2;
  const between = isBelow ? foot + lane : here.y - gap + lane;
  const last = isDown ? there.y + header * 0.7 : there.y + there.height - pad / 2;
  return [
    [out, start],
    [out, between],
    [into, between],
    [into, last],
  ];
}

function paintArrows({ ctx, theme }, view, ways) {
  ctx.lineJoin = "round";
  for (const way of ways) {
    const points = way.map(([x, y]) => [view.toX(x), view.toY(y)]);
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
    ctx.strokeStyle = theme.paper; // a rim, as frames have edges of their own
    ctx.lineWidth = 6;
    ctx.stroke(line);
    ctx.lineWidth = 3;
    ctx.stroke(head);
    ctx.strokeStyle = ctx.fillStyle = theme.ink;
    ctx.lineWidth = 2.5;
    ctx.stroke(line);
    ctx.fill(head);
  }
}
