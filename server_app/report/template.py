"""The report's page, for Jinja, and its style.

They live in a Python module because Flower's app bundle carries no ``.j2`` or ``.html`` file:
a run started with ``flwr run`` would come to its end and find no template.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --ink: #22252b; --muted: #656a73; --line: #e3e1db;
  --global: #b8650a; --personal: #1667b0; --other: #5a6b7b;
  --good: #1d7a55; --good-soft: #e3f3ec; --alarm: #a8241c; --alarm-soft: #fdecea;
  --note: #7a5a00; --note-soft: #fdf4da;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1d2025; --ink: #e7e6e2; --muted: #9ea4ad; --line: #34383f;
    --global: #f0a34a; --personal: #6cb4f5; --other: #9fb0c0;
    --good: #74d3ab; --good-soft: #17362a; --alarm: #ff9d92; --alarm-soft: #43201d;
    --note: #f0cf7a; --note-soft: #3a3015;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; margin: 0;
  overflow-wrap: anywhere; }
h2 { font-size: 18px; font-weight: 650; letter-spacing: -.005em; margin: 48px 0 14px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
p { margin: 0; }
small, .small { font-size: 13px; }
.muted { color: var(--muted); }
.eyebrow { font-size: 13px; color: var(--muted); margin-bottom: 4px; }
.title { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
.facts { color: var(--muted); margin-top: 6px; }
.badge { font-size: 13px; font-weight: 600; padding: 2px 11px; border-radius: 99px;
  background: var(--alarm-soft); color: var(--alarm); }
.badge.finished { background: var(--good-soft); color: var(--good); }
.banner { margin-top: 18px; padding: 14px 18px; border-radius: 10px; border-left: 5px solid;
  overflow-wrap: anywhere; }
.banner strong { display: block; font-size: 16px; }
.banner.alarm { background: var(--alarm-soft); border-color: var(--alarm); }
.banner.alarm strong { color: var(--alarm); }
.banner.note { background: var(--note-soft); border-color: var(--note); }
.banner.note strong { color: var(--note); }
.cards { display: grid; gap: 18px; grid-template-columns: repeat(3, 1fr); margin-top: 26px; }
.card, figure, .table { background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; min-width: 0; }
.card { padding: 18px 20px; }
.card h2 { font-size: 14px; font-weight: 600; margin: 0 0 10px; color: var(--muted); }
.big { font-size: 36px; line-height: 1.1; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.big small { font-size: 18px; font-weight: 500; letter-spacing: 0; }
.personal { color: var(--personal); } .global { color: var(--global); }
.alarm { color: var(--alarm); } .note { color: var(--note); }
.whole { white-space: nowrap; }
.void { text-decoration: line-through; text-decoration-thickness: 3px; }
.lead { max-width: 75ch; margin-bottom: 12px; }
.card .small { margin-top: 6px; overflow-wrap: anywhere; }
.gain { margin-left: 8px; color: var(--muted); white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 22px; margin: 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.statement { font-size: 16px; max-width: 75ch; margin-bottom: 14px; overflow-wrap: anywhere; }
.terms { padding: 18px 20px; margin-bottom: 18px; }
.terms dl { grid-template-columns: max-content 1fr max-content 1fr; }
.plots { display: grid; gap: 18px; grid-template-columns: 1fr 1fr; }
.plots + .plots { margin-top: 18px; }
figure { margin: 0; padding: 16px 16px 8px; display: flex; flex-direction: column; }
.drawing { margin-top: auto; padding-top: 8px; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: inherit !important; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--muted);
  margin-top: 3px; }
.keys span { display: inline-flex; align-items: center; gap: 7px; }
.keys i { flex: none; display: inline-block; }
i.personal { --c: var(--personal); } i.global { --c: var(--global); }
i.other { --c: var(--other); } i.muted { --c: var(--muted); } i.ink { --c: var(--ink); }
i.line { width: 20px; border-top: 2.5px solid var(--c); }
i.line.dashed { border-top-style: dashed; }
i.dot { width: 10px; height: 10px; border-radius: 50%; background: var(--c); }
i.dot.global { border-radius: 1px; background: none; border: 2.5px solid var(--c); }
i.bar { width: 14px; height: 9px; background: var(--c); opacity: .85; }
i.diamond { width: 8px; height: 8px; background: var(--c); transform: rotate(45deg); }
.table { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 9px 12px; }
thead th { font-size: 13px; font-weight: 600; color: var(--muted); vertical-align: bottom;
  white-space: nowrap; border-bottom: 1px solid var(--line); }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { font-weight: 600; min-width: 105px; max-width: 220px; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; }
td:first-child { min-width: 90px; }
td.text { min-width: 165px; max-width: 420px; overflow-wrap: anywhere; }
.pair { color: var(--muted); } .pair b { color: var(--personal); font-weight: 600; }
.pair span { color: var(--global); }
.tall { max-height: 420px; overflow-y: auto; }
.tall thead th { position: sticky; top: 0; background: var(--card); }
caption { text-align: left; padding: 12px 12px 4px; font-weight: 600; }
.regions th, .regions td { padding: 9px; }
.regions :is(th, td):first-child { padding-left: 12px; }
.regions th:first-child { position: sticky; left: 0; background: var(--card); z-index: 1; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 12px 20px; margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
details dl { margin: 12px 0 6px; font-size: 14px; }
details dd { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: 13px; }
@media (max-width: 820px) {
  main { padding: 24px 14px 48px; }
  .cards, .plots { grid-template-columns: minmax(0, 1fr); gap: 12px; }
  .plots + .plots { margin-top: 12px; }
  .terms dl { grid-template-columns: max-content 1fr; }
  h2 { margin-top: 36px; }
  th, td { padding: 8px 10px; }
  tbody th { max-width: 130px; } td.text { min-width: 260px; }
  details dl { grid-template-columns: 1fr; gap: 0; } details dd { margin-bottom: 8px; }
}
@media print {
  :root { color-scheme: light; } body { background: none; }
  .card, figure, .table, details { break-inside: avoid; }
}
"""

PAGE = """\
{% macro change(title, before, after, note) %}
<section class="card">
  <h2>{{ title }}</h2>
  {% if before is none and after is none %}
  <p class="big muted">{{ nothing }}</p>
  <p class="small muted">not evaluated</p>
  {% else %}
  <p class="big"><span class="personal">{{ after|percent }}<small> %</small></span>
    <small class="gain">{{ points(before, after) }} points</small></p>
  <p class="small"><span class="personal">personalised</span> ·
    <span class="global">global</span> <b class="global">{{ before|percent }} %</b></p>
  {% if note %}<p class="small muted">{{ note }}</p>{% endif %}
  {% endif %}
</section>
{% endmacro %}
{% macro pair(before, after) %}
<td class="n pair">
  {%- if before is none and after is none -%}{{ nothing }}
  {%- else -%}<span>{{ before|percent }}</span> → <b>{{ after|percent }}</b>
  {%- endif -%}
</td>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>RegionFed run {{ name }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
  <p class="eyebrow">RegionFed run</p>
  <div class="title">
    <h1>{{ name }}</h1>
    <span class="badge {{ 'finished' if status == 'finished' }}">{{ status }}</span>
  </div>
  <p class="facts">{{ rounds }}{% if planned %} of {{ planned }}{% endif %}
    {{ "round" if (planned or rounds) == 1 else "rounds" }} ·
    {{ regions|length }} {{ "region" if regions|length == 1 else "regions" }} ·
    {{ seconds|duration }}{% if seed is not none %} · seed {{ seed }}{% endif %}</p>
  {% for banner in banners %}
  <div class="banner {{ banner.kind }}" role="{{ 'alert' if banner.kind == 'alarm' else 'note' }}">
    <strong>{{ banner.title }}</strong>{{ banner.text }}
  </div>
  {% endfor %}
</header>

<div class="cards">
  {% set before, after = scores.global, scores.personalised %}
  {% set users = "" if user is none else "users' own models: " ~ user|percent ~ " %" %}
  {{ change("Accuracy, mean over regions", before.get("mean"), after.get("mean"), users) }}
  {{ change("Accuracy, worst region (RRS)", before.get("rrs"), after.get("rrs"), worst) }}
  <section class="card">
    <h2>Privacy spent</h2>
    {% if privacy.get("mode") == "none" %}
    <p class="big alarm">none</p>
    <p class="small muted">no noise, no guarantee</p>
    {% else %}
    <p class="big"><small>ε</small>
      <span{% if privacy.get("noise_seeded") %} class="void"{% endif %}>{{ epsilon|epsilon }}</span>
    </p>
    {% if privacy.get("noise_seeded") %}<p class="alarm">void: the noise was seeded</p>{% endif %}
    {% if privacy.get("simulated_cohort") %}<p class="note">simulated cohort</p>{% endif %}
    <p class="small">at δ = {{ privacy.get("delta")|number }},
      unit: {{ privacy.get("unit")|cell }}</p>
    <p class="small muted">sampling: {{ privacy.get("sampling")|cell }} · neighbours:
      {{ privacy.get("neighbouring")|cell }} · {{ privacy.get("accountant")|cell }}</p>
    {% endif %}
  </section>
</div>

{% if plots %}
<h2>Results</h2>
{% for row in plots %}
<div class="plots">
  {% for plot in row %}
  <figure>
    <figcaption>
      <h3>{{ plot.title }}</h3>
      <div class="keys" aria-hidden="true">
        {% for key in plot.keys %}
        <span><i class="{{ key.swatch }}"></i>{{ key.label }}</span>
        {% endfor %}
      </div>
    </figcaption>
    <div class="drawing" role="img" aria-label="{{ plot.alt }}">{{ plot.svg|drawing }}</div>
  </figure>
  {% endfor %}
</div>
{% endfor %}
{% endif %}

{% if regions %}
<h2>Each region</h2>
<p class="lead muted">Accuracy in %, <span class="global">global</span> →
  <b class="personal">personalised</b>{% if evaluation.get("release") %}; scores were
  {{ releases.get(evaluation.release, evaluation.release) }}
  {%- if evaluation.get("epsilon") is not none %}, at
  <span class="whole">ε = {{ evaluation.epsilon|epsilon }}</span>
  {%- if evaluation.get("delta") is not none %},
  <span class="whole">δ = {{ evaluation.delta|number }}</span>{% endif %}
  for held-out examples{% endif %}{% endif %}.
  {% if evaluation.get("statement") %}{{ evaluation.statement }}{% endif %}</p>
<div class="table" tabindex="0">
<table class="regions">
  <thead><tr>
    <th scope="col">Region</th><th scope="col" class="n">Mean</th>
    <th scope="col" class="n">Gain</th>
    {% if user is not none %}
    <th scope="col" class="n">Users' own</th>
    {% endif %}
    {% for task in tasks %}
    <th scope="col" class="n">{{ task|title_of }}</th>
    {% endfor %}
    <th scope="col" class="n">Examples</th><th scope="col" class="n">Conflict</th>
    <th scope="col" class="n">Alpha</th><th scope="col" class="n">Rho</th>
    <th scope="col">Strategy</th>
  </tr></thead>
  <tbody>
  {% for region in regions %}
  <tr>
    <th scope="row">{{ region.name }}</th>
    {{ pair(region.global_, region.personalised) }}
    <td class="n">{{ points(region.global_, region.personalised) }}</td>
    {% if user is not none %}
    <td class="n">{{ region.user|percent }}</td>
    {% endif %}
    {% for before, after in region.tasks %}
    {{ pair(before, after) }}
    {% endfor %}
    <td class="n">{{ region.record.get("examples")|cell }}</td>
    <td class="n">{{ region.record.get("conflict")|figures }}</td>
    <td class="n">{{ region.record.get("alpha")|figures }}</td>
    <td class="n">{{ region.record.get("rho")|figures }}</td>
    <td class="text">{{ region.record.get("strategy")|cell }}
      {% if region.record.get("reason") %}
      <div class="small muted">{{ region.record.reason }}</div>
      {% endif %}</td>
  </tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% endif %}

{% if privacy %}
<h2>Privacy</h2>
{% if privacy.get("statement") %}<p class="statement">{{ privacy.statement }}</p>{% endif %}
<div class="card terms"><dl>
  {% for title, value in terms %}
  <dt>{{ title }}</dt><dd>{{ value }}</dd>
  {% endfor %}
</dl></div>
{% if events %}
<div class="table" tabindex="0">
<table>
  <caption>What was released, as planned; each region's ledger has every event</caption>
  <thead><tr>
    {% for column in columns %}
    <th scope="col"{% if column in numeric %} class="n"{% endif %}>{{ column|title_of }}</th>
    {% endfor %}
  </tr></thead>
  <tbody>
  {% for event in events %}
  <tr>
    {% for column in columns %}
    <td{% if column in numeric %} class="n"{% endif %}>{{ event.get(column)|cell }}</td>
    {% endfor %}
  </tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% endif %}
{% endif %}

<h2>Failures</h2>
{% if failures %}
<div class="table{% if failures|length > 8 %} tall{% endif %}" tabindex="0">
<table>
  <thead><tr><th scope="col">Round</th><th scope="col">Region</th>
    <th scope="col">Client</th><th scope="col">Reason</th></tr></thead>
  <tbody>
  {% for failure in failures %}
  <tr><td>{{ failure.get("round")|cell }}</td><td>{{ failure.get("region")|cell }}</td>
    <td>{{ failure.get("client")|cell }}</td>
    <td class="text">{{ failure.get("reason")|cell }}</td></tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% if failures_in_all > failures|length %}
<p class="small muted">The first {{ failures|length }} of {{ failures_in_all }}; all of them are in
  summary.json.</p>
{% endif %}
{% else %}
<p class="muted">None recorded.</p>
{% endif %}

<h2>How it was run</h2>
{% for title, entries in details if entries %}
<details{% if loop.first %} open{% endif %}>
  <summary>{{ title }}</summary>
  <dl>
    {% for key, value in entries.items() %}
    <dt>{{ key }}</dt><dd>{{ value|cell }}</dd>
    {% endfor %}
  </dl>
</details>
{% else %}
<p class="muted">Not recorded.</p>
{% endfor %}
</main>
</body>
</html>
"""
