"""The report of fabric-check: one HTML file with its pictures in it, and the bundle to send back.

Both are of the same figures (bundle.json), from which names and secrets were taken out before. The
page has no script and loads nothing; it is written for a laptop's width and a phone's.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import jinja2  # torch requires it

from moe_p2p.bench.fabric_pictures import Body, label, pictures, system
from moe_p2p.bench.fabric_predicted import verdict

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>moe_p2p fabric-check</title>
<style>
body { font: 16px/1.45 system-ui, sans-serif; color: #222; margin: 0 auto; padding: 0 12px 3em;
       max-width: 1160px; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86em; }
td, th { padding: 3px 7px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
.text { text-align: left; } .words td { white-space: normal; }
.wide { overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 12px; }
.pictures svg { width: 100%; max-width: 540px; height: auto; flex: 1 1 320px; }
.good { color: #176b2c; font-weight: 600; } .bad { color: #b00020; font-weight: 600; }
.note { color: #555; font-size: .9em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: 8px;
      font-size: .8em; }
</style></head><body>
<h1>fabric-check: {{ body.ranks }} ranks on {{ body.hosts }} host{{ "s" if body.hosts != 1 }}</h1>
<p class="{{
'bad' if body.wrong or unwell else 'good' if body.check }}">{{ summary }}</p>
<p class="note">moe_p2p {{ body.version }}, {{ body.made }}, {{ "%.0f" % body.seconds }} s{{
", --quick" if body.options.quick }}. {{ boundary }}</p>
{% for text in body.wrong[:20] %}<p class="bad">{{ text }}</p>{% endfor %}

<h2>Steps</h2>
<div class="wide"><table class="words"><tr><th class="text">step</th>
<th class="text">ended</th><th>s</th><th class="text">why</th></tr>
{% for step in body.steps %}<tr><td class="text">{{ step.name }}</td>
<td class="text {{ 'good' if step.how == 'done' else '' if step.how == 'left out' else 'bad' }}">{{
step.how }}</td><td>{{ step.seconds or "" }}</td><td class="text">{{ step.why }}</td></tr>
{% endfor %}</table></div>
{% for step in body.steps if step.output %}<p>The end of the output of rank {{ step.rank }} in
“{{ step.name }}”:</p><pre>{{ step.output }}</pre>{% endfor %}

{% if pictures %}<h2>Pictures</h2><div class="pictures">{% for each in pictures %}{{ each|safe }}
{% endfor %}</div>{% endif %}
{% if no_pictures %}<p class="note">no pictures: {{ no_pictures }}</p>{% endif %}

{% for table in tables %}<h2>{{ table.title }}</h2>
{% if table.note %}<p class="note">{{ table.note }}</p>{% endif %}
<div class="wide"><table><tr>{% for head in table.heads %}<th class="{{ 'text' if loop.first }}">{{
head }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td class="{{ 'text' if loop.first }}
{{- ' bad' if cell in bad_words }}">{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div>{% endfor %}

<h2>Hosts</h2>
{% for host in body.facts %}<h3>host-{{ loop.index0 }}</h3>
<p class="note">Linux {{ host.doctor.machine.kernel }}, {{ host.doctor.machine.cpus }} CPUs, driver
{{ host.doctor.machine.driver or "none" }}, Python {{ host.python }}; transport
{{ host.doctor.transport.provider or "none" }}: {{ host.doctor.transport.why }}</p>
{% for problem in host.doctor.problems %}<p><span class="bad">{{ problem.what }}</span><br>
{{ problem.remedy }}</p>{% else %}<p class="good">the doctor finds no problem</p>{% endfor %}
{% else %}<p class="note">not examined</p>{% endfor %}
<p class="note">bundle.tar.gz has all figures of this page, what the doctor found on each host,
versions and settings; no secrets, names of hosts or users, or addresses.</p>
</body></html>
"""


def write(body: Body, folder: Path) -> list[Path]:
    """Writes report.html and bundle.tar.gz; returns both."""
    page = html(body)
    folder.mkdir(parents=True, exist_ok=True)
    report, bundle = folder / "report.html", folder / "bundle.tar.gz"
    report.write_text(page)
    with tarfile.open(bundle, "w:gz") as archive:
        for name, text in (("bundle.json", json.dumps(body, indent=1)), ("report.html", page)):
            data = text.encode()
            member = tarfile.TarInfo(name)  # without owner and time
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return [report, bundle]


def html(body: Body) -> str:
    drawn, missing = pictures(body)
    unwell = [step for step in body["steps"] if step["how"] not in ("done", "left out")]
    comparable = any(row["comparable"] for row in [*body["rails"], *body["pairs"]])
    boundary = (
        f"Predicted: {body['model']['nic']} at {body['model']['gbps']:g} Gbit/s a GPU, in brackets "
        "the interval in which the model meets published points"
    )
    if not comparable:
        boundary += "; these ranks have no GPUs with such NICs, so it is only shown beside"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        body=body,
        unwell=unwell,
        summary=_summary(body, unwell),
        boundary=f"{boundary}.",
        pictures=drawn,
        no_pictures=missing,
        tables=[table for table in (_check(body), _rails(body), _pairs(body)) if table["rows"]],
        bad_words=("NO", "WRONG", "above", "failed"),
    )


def _summary(body: Body, unwell: Sequence[Body]) -> str:
    lines = body["check"]
    right = sum(not line["wrong"] and line["how"].startswith("ok") for line in lines)
    parts = [f"{right} of {len(lines)} checks are right" if lines else "nothing was checked"]
    skipped = sum(line["how"].startswith("skipped") for line in lines)
    parts += [f"not for these ranks: {skipped}"] if skipped else []
    parts += [f"errors: {len(body['wrong'])}"] if body["wrong"] else []
    parts += [f"{step['name']}: {step['how']}" for step in unwell]
    parts += [body["interrupted"]] if body["interrupted"] else []
    return "; ".join(parts)


# --- tables ---


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Body:
    return {"title": title, "heads": heads, "rows": rows, "note": note}


def between(predicted: Sequence[float] | None) -> str:
    """ "43 (35-51)"."""
    return "{:,.0f} ({:,.0f}-{:,.0f})".format(*predicted) if predicted else ""


def _check(body: Body) -> Body:
    lines = [line for line in body["check"] if not line["how"].startswith("ok")]
    rows = [[line["name"], line["how"]] for line in lines]
    return _table("Checks that are not “ok”", ["check", "ended"], rows)


def _rails(body: Body) -> Body:
    sizes = sorted({int(size) for row in body["rails"] for size in row["gbytes_per_s"]})
    rows = []
    for row in body["rails"]:
        rates = [row["gbytes_per_s"].get(str(size)) for size in sizes]
        top, latency = row["predicted"].get("gbytes_per_s"), row["predicted"].get("latency_us")
        comparable = row["comparable"]
        rows.append(
            [
                label(row),
                f"host-{row['host']}",
                *("" if rate is None else f"{rate:,.2f}" for rate in rates),
                between(top),
                verdict(rates[-1], top, comparable=comparable) if rates and rates[-1] else "",
                "" if row["latency_us"] is None else f"{row['latency_us']:,.1f}",
                "" if row["calls_us"] is None else f"{row['calls_us']:,.1f}",
                between(latency),
                "WRONG" if row["problem"] else "yes",
            ]
        )
    heads = [f"GB/s, {_bytes(size)}" for size in sizes]
    heads = ["rail", "of", *heads, "predicted", "", "µs one way", "calls", "predicted", "right"]
    note = (
        "GB/s by pages of a size, one rail alone, then all rails of all ranks at once. µs: half of "
        "a ping of 8 bytes and its answer, from Python; calls: what a write costs without a NIC."
    )
    return _table("Rails", heads, rows, note)


def _pairs(body: Body) -> Body:
    rows = []
    for row in sorted(body["pairs"], key=lambda row: (row["tokens"], row["interface"])):
        value, predicted = row["p50_us"], row["predicted"]
        rows.append(
            [
                system(row),
                f"{row['tokens']:,}",
                row["what"],
                f"{value:,.1f}",
                f"{row['p99_us']:,.1f}",
                between(predicted),
                verdict(value, predicted, comparable=row["comparable"]),
                "yes" if row["correct"] else "NO",
            ]
        )
    heads = ["system", "T", "what", "p50 µs", "p99", "predicted", "", "right"]
    note = body["pairs"][0]["boundary"] if body["pairs"] else ""
    return _table("Dispatch and combine", heads, rows, note)


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
