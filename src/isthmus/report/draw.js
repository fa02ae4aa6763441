// Draws the figures of the page as SVG, sorts tables, and switches series on and off. No library, nothing is fetched.
//
// A figure is {data: [trace, ...], layout: {...}} as isthmus/report/figures.py makes it: a small part of plotly's format.
//   trace.type   scatter (lines, markers, or filled), bar (upright side by side, or lying and stacked), heatmap
// A colour '@name' or '@name/alpha' is a variable of the style sheet, so the theme may change while the page is open.
(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = {};  // section -> series switched off in its legend
  const SVG = "http://www.w3.org/2000/svg";
  const DASH = {solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4"};

  const colour = (value) => {
    if (typeof value !== "string" || value[0] !== "@") return value;
    const [name, alpha] = value.slice(1).split("/");
    const found = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    if (!alpha) return found;
    return `rgba(${[1, 3, 5].map((at) => parseInt(found.slice(at, at + 2), 16)).join(",")},${alpha})`;
  };
  const add = (parent, name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  };
  // Texts carry <b>, <br> and escaped characters, as the Python side writes them; here they become plain text.
  const plain = (text) => String(text ?? "").replace(/<br>/g, "\n").replace(/<\/?b>/g, "")
    .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  const bold = (text) => /^<b>/.test(String(text));
  const hover = (mark, text) => { if (text) add(mark, "title", {}, plain(text)); };
  const short = (value) => {
    const size = Math.abs(value);
    const [unit, by] = size >= 1e9 ? ["G", 1e9] : size >= 1e6 ? ["M", 1e6] : size >= 1e3 ? ["k", 1e3] : ["", 1];
    return `${Number((value / by).toPrecision(3))}${unit}`;
  };

  const ticksOf = (low, high, count, whole) => {
    const raw = Math.max(whole ? 1 : 0, (high - low) / Math.max(1, count) || 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999 && !(whole && s % 1));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
    return found;
  };
  const textOf = (axis, value) => {
    if (axis.tickformat === "~s") return short(value).replace(/([kMG]?)$/, " $1") + (axis.ticksuffix || "");
    return `${Number(value.toPrecision(6))}${axis.ticksuffix || ""}`;
  };

  const extent = (traces, key, axis) => {
    if (axis.range) return [Math.min(...axis.range), Math.max(...axis.range)];
    let values = [];
    const lying = traces.some((t) => t.orientation === "h");
    if (lying && key === "x") {
      const sums = {};
      traces.forEach((t) => t.y.forEach((at, i) => { sums[at] = (sums[at] || 0) + t.x[i]; }));
      values = Object.values(sums);
    } else {
      traces.forEach((t) => {
        values.push(...t[key].filter((v) => v !== null));
        if (key === "y" && t.error_y) t.y.forEach((v, i) => {
          values.push(v + t.error_y.array[i], v - t.error_y.arrayminus[i]);
        });
      });
    }
    if (axis.rangemode === "tozero" || traces.some((t) => t.type === "bar")) values.push(0);
    let low = Infinity, high = -Infinity;
    values.forEach((v) => { low = Math.min(low, v); high = Math.max(high, v); });
    if (!isFinite(low)) [low, high] = [0, 1];
    if (low === high) [low, high] = low ? [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1] : [0, 1];
    const room = (high - low) * 0.05;
    const floor = axis.rangemode === "tozero" && low >= 0;
    return [floor ? 0 : low - room, high + room];
  };

  const marker = (parent, symbol, x, y, size, attributes) => {
    const r = size / 2;
    const path = (points) => add(parent, "path", {...attributes, d: "M" + points.map((p) => p.join(",")).join("L") + "Z"});
    if (symbol === "square") return add(parent, "rect", {...attributes, x: x - r, y: y - r, width: size, height: size});
    if (symbol === "diamond") return path([[x, y - r * 1.3], [x + r * 1.3, y], [x, y + r * 1.3], [x - r * 1.3, y]]);
    if (symbol === "triangle-up") return path([[x, y - r * 1.2], [x + r * 1.1, y + r], [x - r * 1.1, y + r]]);
    if (symbol === "triangle-down") return path([[x, y + r * 1.2], [x + r * 1.1, y - r], [x - r * 1.1, y - r]]);
    if (symbol === "cross" || symbol === "x") {
      const t = r / 3, arms = [[-t, -r], [t, -r], [t, -t], [r, -t], [r, t], [t, t], [t, r], [-t, r], [-t, t], [-r, t],
        [-r, -t], [-t, -t]];
      const turn = symbol === "x" ? Math.SQRT1_2 : 1, s = symbol === "x" ? Math.SQRT1_2 : 0;
      return path(arms.map(([a, b]) => [x + a * turn - b * s, y + a * s + b * turn]));
    }
    return add(parent, "circle", {...attributes, cx: x, cy: y, r});
  };

  const lines = (svg, trace, X, Y) => {
    const stroke = trace.line || {};
    const points = trace.x.map((x, i) => [X(x), Y(trace.y[i])]);
    if (trace.fill === "toself") {
      add(svg, "path", {d: "M" + points.map((p) => p.join(",")).join("L") + "Z", fill: colour(trace.fillcolor)});
      return;
    }
    if (trace.mode.includes("lines")) {
      const line = add(svg, "path", {d: "M" + points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join("L"), fill: "none",
        stroke: colour(stroke.color), "stroke-width": stroke.width || 2, "stroke-dasharray": DASH[stroke.dash] || "",
        "stroke-linejoin": "round"});
      if (typeof trace.hovertext === "string") hover(line, trace.hovertext);
    }
    points.forEach(([x, y], i) => {
      const text = Array.isArray(trace.hovertext) ? trace.hovertext[i] : "";
      if (trace.mode.includes("markers")) {
        const style = trace.marker;
        hover(marker(svg, style.symbol, x, y, style.size || 7, {fill: colour(style.color),
          stroke: colour((style.line || {}).color) || "none", "stroke-width": (style.line || {}).width || 0}), text);
      } else if (text && points.length <= 400) {
        hover(add(svg, "circle", {cx: x, cy: y, r: 6, fill: "transparent"}), text);
      }
    });
  };

  const bars = (svg, traces, layout, X, Y) => {
    const upright = traces.filter((t) => t.type === "bar" && t.orientation !== "h");
    const width = Math.abs(X(1) - X(0)) * (1 - (layout.bargap ?? 0.2));
    upright.forEach((trace, at) => {
      const each = width / upright.length;
      trace.x.forEach((x, i) => {
        const left = X(x) - width / 2 + at * each, top = Y(trace.y[i]), zero = Y(0);
        const gap = each > 6 ? 1 : 0;
        hover(add(svg, "rect", {x: left + gap / 2, y: Math.min(top, zero), width: Math.max(0.5, each - gap),
          height: Math.abs(zero - top), fill: colour(trace.marker.color)}), trace.hovertext[i]);
        if (trace.error_y) {
          const middle = left + each / 2;
          add(svg, "path", {d: `M${middle},${Y(trace.y[i] + trace.error_y.array[i])}V${Y(trace.y[i] - trace.error_y.arrayminus[i])}`,
            stroke: colour("@ink/0.55"), "stroke-width": 1});
        }
      });
    });
    const ends = {};
    const height = Math.abs(Y(1) - Y(0)) * (1 - (layout.bargap ?? 0.2));
    traces.filter((t) => t.orientation === "h").forEach((trace) => trace.y.forEach((y, i) => {
      const from = ends[y] || 0;
      ends[y] = from + trace.x[i];
      hover(add(svg, "rect", {x: X(from), y: Y(y) - height / 2, width: Math.max(0.3, X(ends[y]) - X(from)), height,
        fill: colour(trace.marker.color)}), trace.hovertext[i]);
    }));
  };

  const mix = (stops, share) => {
    const at = Math.min(1, Math.max(0, share)) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
    const [a, b] = [stops[low], stops[low + 1]].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    return a.map((v, i) => Math.round(v + (b[i] - v) * (at - low)));
  };
  const heat = (svg, trace, X, Y) => {
    const stops = trace.colorscale.map(([, value]) => colour(value));
    const w = Math.abs(X(1) - X(0)), h = Math.abs(Y(1) - Y(0)), gap = w > 4 ? 1 : 0;
    trace.z.forEach((row, i) => row.forEach((value, j) => {
      if (value === null) return;
      const rgb = mix(stops, value / trace.zmax);
      hover(add(svg, "rect", {x: X(j) - w / 2 + gap / 2, y: Y(i) - h / 2 + gap / 2, width: w - gap, height: h - gap,
        fill: `rgb(${rgb.join(",")})`}), trace.hovertext ? trace.hovertext[i][j] : `row ${i}, column ${j}: ${short(value)}`);
      const text = trace.text && trace.text[i][j];
      if (text && w > 7 * text.length) add(svg, "text", {x: X(j), y: Y(i) + 4, "text-anchor": "middle", "font-size": 11,
        "pointer-events": "none", fill: luminance(rgb) > 0.179 ? "#000000" : "#ffffff"}, text);
    }));
  };
  // WCAG's relative luminance. At 0.179 black and white letters stand out equally (4.58 to 1).
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };

  // Widths as the browser will draw them, in pixels; a name that is too long is cut in its middle: what tells methods
  // apart is at its end as often as at its beginning.
  const pen = document.createElement("canvas").getContext("2d");
  const measure = (text) => {
    pen.font = `${bold(text) ? 600 : 400} 12px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(plain(text)).width;
  };
  const cut = (text, room) => {
    const whole = plain(text), mark = bold(text) ? "<b>" : "";
    for (let keep = whole.length; keep > 4; keep--) {
      const tail = Math.floor(keep * 0.6);
      const shown = keep === whole.length ? whole : `${whole.slice(0, keep - tail)}…${whole.slice(-tail)}`;
      if (measure(mark + shown) <= room) return shown;
    }
    return whole.slice(0, 4);
  };

  const paint = (place) => {
    const figure = figures[place.id], layout = figure.layout;
    const off = hidden[place.dataset.section] || new Set();
    const traces = figure.data.filter((t) => !t.meta || !off.has(t.meta.series));
    const W = Math.max(240, place.clientWidth), H = layout.height;
    place.replaceChildren();
    const svg = add(place, "svg", {width: W, height: H, viewBox: `0 0 ${W} ${H}`, "aria-hidden": "true"});
    if (!traces.length) return;
    const isHeat = traces[0].type === "heatmap";
    const xs = layout.xaxis, ys = layout.yaxis;
    const [x0, x1] = extent(traces, "x", xs), [y0, y1] = extent(traces, "y", ys);
    const yAt = ys.tickvals || ticksOf(y0, y1, ys.nticks || Math.max(2, Math.min(6, H / 50)), ys.whole);
    const longest = W * 0.4;
    const yText = yAt.map((v, i) => ys.ticktext ? ys.ticktext[i] : textOf(ys, v));
    let legendHeight = 0, spots = [];
    if (layout.showlegend) {
      let at = 0, row = 0;
      traces.forEach((t) => {
        const need = 32 + measure(t.name);
        if (at + need > W && at) { at = 0; row++; }
        spots.push([at, row, t]);
        at += need;
      });
      legendHeight = 20 * (row + 1) + 4;
    }
    const left = Math.max(30, ...yText.map((t) => Math.min(longest, measure(t)) + 14)) + (ys.title ? 18 : 0);
    const right = isHeat ? 16 : 14, top = 10 + legendHeight, bottom = 26 + (xs.title ? 18 : 0);
    const X = (v) => left + (v - x0) / (x1 - x0) * (W - left - right);
    const down = ys.range && ys.range[0] > ys.range[1];
    const Y = (v) => down ? top + (v - y0) / (y1 - y0) * (H - top - bottom) : H - bottom - (v - y0) / (y1 - y0) * (H - top - bottom);
    const label = {fill: colour("@muted"), "font-size": 12};
    let xAt = xs.tickvals || ticksOf(x0, x1, xs.nticks || Math.max(2, Math.min(8, W / 90)), xs.whole);
    let xText = xAt.map((v, i) => xs.ticktext ? xs.ticktext[i] : textOf(xs, v));
    const widest = Math.max(...xText.map(measure)) + 8;
    const every = Math.max(1, Math.ceil(widest * xAt.length / (W - left - right)));
    yAt.forEach((v, i) => {
      if (ys.showgrid !== false && !isHeat) add(svg, "path", {d: `M${left},${Y(v)}H${W - right}`, stroke: colour("@grid")});
      add(svg, "text", {...label, x: left - 8, y: Y(v) + 4, "text-anchor": "end",
        ...(bold(yText[i]) ? {fill: colour("@ink"), "font-weight": 600} : {})}, cut(yText[i], longest));
    });
    xAt.forEach((v, i) => {
      if (i % every) return;
      if (xs.showgrid) add(svg, "path", {d: `M${X(v)},${top}V${H - bottom}`, stroke: colour("@grid")});
      const half = measure(xText[i]) / 2;
      add(svg, "text", {...label, x: Math.max(half, Math.min(X(v), W - half - 1)), y: H - bottom + 17,
        "text-anchor": "middle"}, plain(xText[i]));
    });
    if (!isHeat) add(svg, "path", {d: `M${left},${H - bottom}H${W - right}`, stroke: colour("@line")});
    if (xs.title) add(svg, "text", {...label, x: Math.max((left + W - right) / 2, measure(xs.title.text) / 2), y: H - 6,
      "text-anchor": "middle"}, cut(xs.title.text, W));
    if (ys.title) add(svg, "text", {...label, transform: `translate(12,${(top + H - bottom) / 2}) rotate(-90)`,
      "text-anchor": "middle"}, ys.title.text);
    spots.forEach(([at, row, t]) => {
      add(svg, "rect", {x: at, y: 4 + 20 * row, width: 10, height: 10, rx: 2, fill: colour(t.marker.color)});
      add(svg, "text", {...label, x: at + 15, y: 13 + 20 * row}, plain(t.name));
    });
    if (isHeat) heat(svg, traces[0], X, Y);
    bars(svg, traces, layout, X, Y);
    traces.filter((t) => t.type === "scatter").forEach((t) => lines(svg, t, X, Y));
    // Names beside their marks; one that would lie on another moves down or up, or to the left of its mark.
    const taken = traces.filter((t) => t.mode === "markers").flatMap((t) => t.x.map((v, i) =>
      [X(v) - 7, Y(t.y[i]), X(v) + 7]));
    (layout.annotations || []).forEach((a) => {
      const text = plain(a.text).trim(), wide = measure(text), x = X(a.x) + 10, places = [];
      [0, 13, -13, 26, -26, 39, -39].forEach((by) => places.push([x, by], [X(a.x) - 10 - wide, by]));
      const inside = ([at, by]) => at >= left && at + wide <= W && Y(a.y) + by > top && Y(a.y) + by < H - bottom;
      const free = ([at, by]) => taken.every(([l, t, r]) => at > r || at + wide < l || Math.abs(Y(a.y) + by - t) > 12);
      const [at, by] = places.find((place) => inside(place) && free(place)) || places.find(inside) || places[0];
      taken.push([at, Y(a.y) + by, at + wide]);
      add(svg, "text", {...label, x: at, y: Y(a.y) + by + 4}, text);
    });
  };

  // The same figures as numbers, for who reads with ears or wants to copy: made when it is opened.
  const numbers = (place) => {
    const details = document.createElement("details"), summary = document.createElement("summary");
    details.className = "numbers";
    summary.textContent = "Numbers of this figure";
    details.appendChild(summary);
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const table = document.createElement("table"), body = table.createTBody();
      figures[place.id].data.forEach((trace) => {
        const texts = (trace.hovertext ? [trace.hovertext].flat(2) : []).filter(Boolean);
        texts.slice(0, 400).forEach((text) => { body.insertRow().insertCell().textContent = plain(text).replace(/\n/g, ", "); });
      });
      const scroll = document.createElement("div"), name = `numbers: ${place.getAttribute("aria-label")}`;
      table.setAttribute("aria-label", name);
      scroll.className = "scroll tall";
      scroll.tabIndex = 0;
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", name);
      scroll.appendChild(table);
      details.appendChild(scroll);
    });
    place.after(details);
  };

  const draw = (section) => document.querySelectorAll(".plot").forEach((place) => {
    if (section === undefined || place.dataset.section === section) paint(place);
  });

  document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
    const off = hidden[button.dataset.section] ||= new Set();
    const series = Number(button.dataset.series), show = off.has(series);
    if (show) off.delete(series); else off.add(series);
    document.querySelectorAll(".legend button").forEach((twin) => {
      if (twin.dataset.section === button.dataset.section && twin.dataset.series === button.dataset.series)
        twin.setAttribute("aria-pressed", String(show));
    });
    draw(button.dataset.section);
  }));

  // Columns sort by the number in data-value, or by text; a click more turns the order round.
  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const number = head.classList.contains("n");
      const up = before ? before === "descending" : !number;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim().toLowerCase();
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [p, q] = [key(a), key(b)];
        if (p === "" || q === "") return (p === "") - (q === "");  // nothing known: always below
        const order = number ? Number(p) - Number(q) : p.localeCompare(q, undefined, {numeric: true});
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    }));
  });

  document.querySelectorAll(".plot").forEach(numbers);
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", () => {
    if (part.open) part.querySelectorAll(".plot").forEach(paint);  // a closed part has no width to draw into
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  let width = innerWidth, wait;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(() => draw(), 80);
  });
  draw();
  document.documentElement.dataset.drawn = "yes";
})();
