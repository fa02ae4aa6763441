"""The look of the page and the script that draws its figures.

Both are constants, so that the page can name the script's digest in its content security policy: a browser then runs
this script and nothing else, and fetches nothing at all.
"""

from __future__ import annotations

from importlib import resources

CSS = """
:root {
  color-scheme: light dark;
  --font: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans",
  sans-serif; --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  --page: #ffffff; --panel: #f6f7f9; --ink: #16191d; --muted: #5b6470; --line: #d9dde3; --grid: #e9ecf0; --accent:
  #0b5cad; --shade: #00000026; --warn-bg: #fff6e0; --warn-line: #e2b64a;
  --s0: #0067b1; --s1: #d1540a; --s2: #00855f; --s3: #b04f8b; --s4: #d98e00; --s5: #3fa3e0; --s6: #8a7b00; --s7:
  #6b7480; --heat0: #f1f5f9; --heat1: #74add6; --heat2: #08427f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101418; --panel: #191f25; --ink: #e8ecf0; --muted: #9aa5b1; --line: #323b45; --grid: #232b33; --accent:
    #79b8f3; --shade: #ffffff30; --warn-bg: #2c2513; --warn-line: #8a6d23;
    --s0: #5aabf0; --s1: #f08a4b; --s2: #2fc198; --s3: #e08fc2; --s4: #f2b632; --s5: #a3d8ff; --s6: #d6cb4f; --s7:
    #98a3ae; --heat0: #1b232b; --heat1: #2f78b7; --heat2: #b5deff;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--font); }
main, header, footer { max-width: 60rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 3rem; }
.eyebrow { margin: 0 0 .4rem; color: var(--accent); font-size: .8rem; font-weight: 600; letter-spacing: .08em;
text-transform: uppercase; } h1 { margin: 0 0 .6rem; font-size: 2.1rem; line-height: 1.18; letter-spacing: -.018em;
text-wrap: balance; overflow-wrap: anywhere; } h2 { margin: 4rem 0 .5rem; padding-top: 2rem; border-top: 2px solid
var(--ink); font-size: 1.6rem; line-height: 1.25;
  letter-spacing: -.012em; overflow-wrap: anywhere; }
h3 { margin: 2.8rem 0 .25rem; font-size: 1.2rem; line-height: 1.3; letter-spacing: -.005em; }
.unseen { position: absolute; width: 1px; height: 1px; margin: 0; padding: 0; border: 0; overflow: hidden;
  clip-path: inset(50%); }
h4 { margin: 0 0 .1rem; font-size: .95rem; font-weight: 600; }
p { margin: .4rem 0; max-width: 44rem; overflow-wrap: anywhere; }
.lede { color: var(--muted); font-size: 1.08rem; }
.what, figcaption, .fine { color: var(--muted); font-size: .92rem; }
figcaption { max-width: 44rem; margin-top: .35rem; }
figure { margin: .9rem 0 0; }
code, pre { font-family: var(--mono); font-size: .85em; }
a { color: var(--accent); }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin: 1.6rem 0 0;
padding: 0;
  background: var(--line); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.tiles div { flex: 1 1 8.2rem; box-sizing: border-box; background: var(--page); padding: .8rem 1rem; }
.tiles dt { color: var(--muted); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; letter-spacing: -.01em; font-variant-numeric: tabular-nums;
} .notes { margin: 1.4rem 0 1.2rem; padding: .7rem 1rem; list-style: none; background: var(--warn-bg); border: 1px solid
var(--warn-line);
  border-radius: 8px; font-size: .92rem; }
.notes li { overflow-wrap: anywhere; }
.roomy td { vertical-align: top; min-width: 4.2rem; }
.roomy td:nth-child(n + 6):nth-last-child(n + 2) { min-width: 10rem; }
/* A shadow at the edge says that a table goes on. */
.scroll { overflow-x: auto; margin: .9rem 0 .5rem; -webkit-overflow-scrolling: touch;
  background: linear-gradient(to right, var(--page) 30%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 30%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / .9rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / .9rem 100% no-repeat scroll; }
.wide { width: min(76rem, 100vw - 3rem); margin-left: calc(50% - min(38rem, 50vw - 1.5rem)); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
caption { caption-side: bottom; padding-top: .4rem; color: var(--muted); font-size: .84rem; text-align: left; }
.sortable thead button { padding: 0; border: 0; background: none; color: inherit; font: inherit; text-align: inherit;
  cursor: pointer; }
.sortable thead button:hover { color: var(--accent); }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
.ref { color: var(--muted); } tr.reference td { color: var(--muted); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--muted); font-size: .82rem; font-weight: 600; line-height: 1.3; vertical-align: bottom;
  border-bottom: 1px solid var(--ink); }
.n { text-align: right; }
td.n { white-space: nowrap; }
td small { color: var(--muted); font-size: .86em; font-weight: 400; }
.results .best th[scope=row], .results .best td:nth-child(2) { font-weight: 700; }
.name { display: flex; align-items: baseline; width: max-content; max-width: 13rem; overflow-wrap: anywhere; }
.key { flex: none; }
.name > span:last-child { min-width: 0; }
.results th[scope=row] { position: sticky; left: 0; background: var(--page); font-weight: 400; min-width: max-content; }
.results td, .results th { padding-left: .45rem; padding-right: .45rem; }
.results th:first-child { padding-left: 0; }
.results td:last-child, .results th:last-child { padding-right: 0; }
.results thead th:first-child { position: sticky; left: 0; background: var(--page); }
.key { display: inline-block; width: .62rem; height: .62rem; margin-right: .5rem; border-radius: 2px;
  background: currentcolor; }
.key.again { background: none; border: 2px dashed currentcolor; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem; margin: .9rem 0 0; padding: 0; }
.legend button { display: inline-flex; align-items: center; max-width: 100%; padding: .22rem .7rem; border: 1px solid
var(--line);
  border-radius: 99px; background: none; color: var(--ink); font: inherit; font-size: .86rem; cursor: pointer;
  overflow-wrap: anywhere; }
.legend button[aria-pressed=false] { opacity: .42; text-decoration: line-through; }
.legend button:hover { border-color: var(--muted); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.2rem 2rem;
margin-top: .9rem; } .pair > div { min-width: 0; }
.plot { width: 100%; }
.plot svg { display: block; max-width: 100%; font-family: var(--font); font-variant-numeric: tabular-nums; }
.numbers, .numbers:first-of-type { border: 0; margin: 0; }
.numbers summary { padding: .15rem 0; color: var(--muted); font-size: .84rem; }
.tall { max-height: 18rem; overflow-y: auto; }
.group th { padding-top: 1.3rem; border-bottom: 1px solid var(--line); font-size: 1rem; color: var(--ink);
overflow-wrap: anywhere; } .group:first-child th { padding-top: .7rem; }
.chip { display: inline-block; margin: 0 .3rem .2rem 0; padding: .02rem .5rem; border: 1px solid var(--line);
border-radius: 99px;
  font-size: .84rem; white-space: nowrap; }
.short th[scope=row] { font-weight: 600; white-space: nowrap; }
.short td { min-width: 13rem; }
.short td b { font-weight: 500; color: var(--muted); }
.route { white-space: nowrap; }
details { border-bottom: 1px solid var(--line); }
details:first-of-type { border-top: 1px solid var(--line); margin-top: .9rem; }
summary { padding: .6rem 0; cursor: pointer; font-size: .95rem; overflow-wrap: anywhere; }
summary:hover { color: var(--accent); }
pre { margin: 0 0 1rem; padding: .9rem 1rem; overflow-x: auto; background: var(--panel); border-radius: 8px;
line-height: 1.5; } dl.words { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0 0
1rem; font-size: .92rem; } dl.words dt { font-weight: 600; } dl.words dd { margin: 0; color: var(--muted); }
nav ul { margin: 1.2rem 0 0; padding-left: 1.2rem; }
footer { margin-top: 4rem; padding-top: 1.2rem; padding-bottom: 3rem; border-top: 1px solid var(--line); }
@media (max-width: 40rem) {
  main, header, footer { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 1.8rem; }
  h1 { font-size: 1.6rem; }
  th, td { padding: .45rem .5rem; }
  .name { max-width: 8.5rem; }
  .wide { width: calc(100vw - 2rem); margin-left: calc(50% - 50vw + 1rem); }
  dl.words { grid-template-columns: 1fr; gap: 0; } dl.words dd { margin-bottom: .5rem; }
}
@media print {
  body { font-size: 12px; } figure, .pair, table { break-inside: avoid; } .legend button { border: 0; padding: 0 .8rem 0
  0; }
}
"""

SCRIPT = resources.files(__package__).joinpath("draw.js").read_text(encoding="utf-8")
