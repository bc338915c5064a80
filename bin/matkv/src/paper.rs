//! `matkv bench report --paper`: latency by phase, batch sizes, overlap, storage and energy in the
//! shape of the MatKV paper's tables, with the published figures beside them.
//!
//! Those are of other hardware and models; only the direction and size of a change compare.

use std::path::Path;

use anyhow::{Context, anyhow};
use matkv_api::v1::Timings;
use matkv_config::Resolved;

use crate::args::{CorpusOptions, QuestionOptions, ReportOptions};
use crate::bench_e2e::{self as e2e, E2eOptions, Measured, Overlap, Run, Tier};
use crate::bench_store::place;
use crate::demo::median;
use crate::energy::{self, Meter};
use crate::render::table;
use crate::stop::Stop;

/// Answer tokens, as in the paper's table.
const ANSWER: u32 = 20;

type Phase = fn(&Timings) -> f64;

/// A stage, how we measure it, and what was published: milliseconds of vanilla and MatKV.
struct Stage {
    name: &'static str,
    phase: Phase,
    published: Option<(f64, f64)>,
}

/// The published ones are of LLaMA-70B on an H100 with four NVMe devices (MatKV, ICDE 2026). In
/// them prefill includes the load of what was stored.
const STAGES: [Stage; 5] = [
    Stage { name: "load", phase: |t| t.load_ms, published: None },
    Stage {
        name: "load and prefill",
        phase: |t| t.load_ms + t.prefill_ms,
        published: Some((2100.0, 900.0)),
    },
    Stage { name: "time to first token", phase: |t| t.first_token_ms, published: None },
    Stage { name: "decode, 20 tokens", phase: |t| t.decode_ms, published: Some((350.0, 350.0)) },
    Stage { name: "end to end", phase: |t| t.total_ms, published: Some((2450.0, 1250.0)) },
];

/// Vanilla, MatKV and with overlap: 256 requests at batch 8 (the same source).
const PUBLISHED_SECONDS: (f64, f64, f64) = (546.0, 306.0, 285.0);
/// The same, of 1,000 requests.
const PUBLISHED_ENERGY: [&str; 4] =
    ["8, published", "566 kJ, 183/kWh", "289 kJ, 358/kWh", "279 kJ"];

const CLAIMS: &str = "\
published: MatKV (ICDE 2026), LLaMA-70B, one H100, 4 × NVMe in RAID-0, TurboRAG's documents, 256
  requests at batch 8; loads of 128 requests, mean, ms: one SSD 93, four 27, memory 6
published: batch 8 at 42 % of vanilla's time, overlap 1.8 to 2.1 times the throughput; mean power
  1,038 W vanilla, 947 W MatKV; kJ and requests per kWh do not agree with each other
published: TurboRAG, time to first token 8.6× lower on average, with a fine-tuned model
Other hardware and another model: the changes compare, the milliseconds do not.";

/// Change of the second against the first, in percent.
fn change((vanilla, matkv): (f64, f64)) -> String {
    if vanilla < 0.5 {
        return "–".into();
    }
    format!("{:+.0} %", (matkv / vanilla - 1.0) * 100.0)
}

fn row(stage: &Stage, measured: (f64, f64)) -> Vec<String> {
    let mut cells = vec![
        stage.name.to_owned(),
        format!("{:.1}", measured.0),
        format!("{:.1}", measured.1),
        change(measured),
    ];
    match stage.published {
        Some((vanilla, matkv)) => {
            cells.extend([format!("{vanilla:.0}"), format!("{matkv:.0}"), change((vanilla, matkv))])
        }
        None => cells.extend(["", "", ""].map(str::to_owned)),
    }
    cells
}

/// Both modes, vanilla first.
const MODES: [&str; 2] = ["vanilla", "linked(32)"];

fn options(o: &ReportOptions, store: &Path) -> anyhow::Result<E2eOptions> {
    Ok(E2eOptions {
        ingest: CorpusOptions { corpus: o.corpus.clone(), documents: o.documents },
        asked: QuestionOptions {
            questions: o.questions.clone().context("--paper needs --questions")?,
            answers: None,
            count: o.count,
        },
        mode: Vec::new(),
        batch: vec![1],
        top_k: vec![4],
        max_new_tokens: vec![ANSWER],
        tier: vec![Tier::Flash],
        encoding: Vec::new(),
        chunk_size: Vec::new(),
        overlap: Vec::new(),
        stream: false,
        store: Some(store.to_owned()),
    })
}

/// Asks every question in both modes, in every batch size and with and without overlap, then from
/// every tier; returns the tables, and whether that is all of them.
pub async fn measure(
    resolved: &Resolved,
    o: &ReportOptions,
    stop: &Stop,
) -> anyhow::Result<(String, bool)> {
    let (store, _temporary) = place(resolved, None)?;
    let options = options(o, &store)?;
    let modes = MODES.map(str::to_owned);
    let meter = Meter::find();
    let meter_used = meter.as_ref().ok();
    let one = E2eOptions { overlap: vec![Overlap::Off], ..options.clone() };
    let (alone, mut ended) = whole(e2e::measure(resolved, &one, &modes, meter_used, stop).await?);
    let mut measured = Vec::new();
    for &size in &o.batch {
        if ended.is_err() {
            break;
        }
        let overlap = vec![Overlap::Off, Overlap::On];
        let stream = E2eOptions { batch: vec![size], overlap, stream: true, ..options.clone() };
        let cases;
        (cases, ended) = whole(e2e::measure(resolved, &stream, &modes, meter_used, stop).await?);
        measured.extend(cases);
    }
    let tiers = E2eOptions {
        tier: vec![Tier::Arena, Tier::Flash, Tier::Cold],
        overlap: vec![Overlap::Off],
        ..options
    };
    let mut kinds = Vec::new();
    if ended.is_ok() {
        (kinds, ended) = whole(e2e::measure(resolved, &tiers, &modes[1..], None, stop).await?);
    }
    let Some(alone) = alone.first() else {
        return Err(ended.err().unwrap_or_else(|| anyhow!("no request was measured")));
    };
    let batches = pairs(&measured);
    let questions = alone.runs[0].answers.len();
    let mut out = format!(
        "{questions} questions, at most {ANSWER} tokens each, {}; chunks on flash, arena cold\n",
        MODES[1]
    );
    out += &format!("\none request at a time, no overlap; medians\n{}", phases(&alone.runs));
    out += &format!(
        "\nall questions there from the beginning, so many decoded together\n{}",
        sweep(&batches)
    );
    out += &format!("\none at a time, no overlap; medians\n{}", storage(&kinds));
    out += &match &meter {
        Ok(meter) => format!("\nenergy: {}\n{}", meter.describe(), energy_table(&batches)),
        Err(_) => format!("\n{}\n", energy::note(&meter)),
    };
    if let Err(e) = &ended {
        out += &format!("\nnot all of it: {e:#}\n");
    }
    Ok((out + "\n" + CLAIMS + "\n", ended.is_ok()))
}

/// Without the case that was not measured to its end: fewer questions would be other ones.
fn whole((mut measured, ended): e2e::Ended) -> e2e::Ended {
    measured.retain(|m| m.is_whole);
    (measured, ended)
}

/// Medians of requests one at a time.
fn phases(runs: &[Run]) -> String {
    let of = |stage: &Stage| {
        let median =
            |m: usize| median(runs[m].answers.iter().map(|a| (stage.phase)(&a.timings)).collect());
        row(stage, (median(0), median(1)))
    };
    let rows: Vec<_> = STAGES.iter().map(of).collect();
    table(&["ms", "vanilla", "MatKV", "change", "published", "MatKV", "change"], &rows)
}

/// Every batch size without overlap and with it.
fn pairs(all: &[Measured]) -> Vec<(&Measured, &Measured)> {
    let of = |overlap| all.iter().filter(move |m| m.setup.overlap == Some(overlap));
    of(Overlap::Off).zip(of(Overlap::On)).collect()
}

/// Seconds of all requests, each beside vanilla of the same minutes.
fn sweep(batches: &[(&Measured, &Measured)]) -> String {
    let cells = |name: String, off: (f64, f64), on: (f64, f64)| {
        let seconds = |s: f64| format!("{s:.1}");
        let (a, b) = ([off.0, off.1].map(seconds), [on.0, on.1].map(seconds));
        let ([vanilla, ours], [beside, overlapped]) = (a, b);
        vec![name, vanilla, ours, change(off), beside, overlapped, change(on)]
    };
    let row = |(off, on): &(&Measured, &Measured)| {
        let of = |m: &Measured| (m.runs[0].seconds, m.runs[1].seconds);
        cells(off.case.batch.to_string(), of(off), of(on))
    };
    let mut rows: Vec<_> = batches.iter().map(row).collect();
    let (vanilla, ours, overlapped) = PUBLISHED_SECONDS;
    rows.push(cells("8, published".into(), (vanilla, ours), (vanilla, overlapped)));
    let head = ["batch, s", "vanilla", "MatKV", "change", "vanilla", "overlap", "change"];
    table(&head, &rows)
}

/// Medians of what a load takes from each tier.
fn storage(all: &[Measured]) -> String {
    let row = |m: &Measured| {
        let of = |f: fn(&Timings) -> f64| {
            let all = m.runs[0].answers.iter().map(|a| f(&a.timings));
            format!("{:.1}", median(all.collect()))
        };
        let name = match m.case.tier {
            Tier::Arena => "memory (arena)",
            Tier::Flash => "flash, O_DIRECT",
            Tier::Cold => "cold tier",
        };
        vec![name.to_owned(), of(|t| t.load_ms), of(|t| t.first_token_ms)]
    };
    table(&["chunks in, ms", "load", "first token"], &all.iter().map(row).collect::<Vec<_>>())
}

fn energy_table(batches: &[(&Measured, &Measured)]) -> String {
    let each = |run: &Run| run.joules.unwrap_or(f64::NAN) / run.answers.len() as f64;
    let row = |(off, on): &(&Measured, &Measured)| {
        let joules = [each(&off.runs[0]), each(&off.runs[1]), each(&on.runs[1])];
        let cells = joules.map(|j| format!("{j:.2} kJ, {:.0}/kWh", 3.6e6 / j));
        std::iter::once(off.case.batch.to_string()).chain(cells).collect::<Vec<_>>()
    };
    let mut rows: Vec<_> = batches.iter().map(row).collect();
    rows.push(PUBLISHED_ENERGY.map(str::to_owned).to_vec());
    table(&["batch, per 1,000 requests", "vanilla", "MatKV", "overlap"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_signed() {
        assert_eq!(change((2100.0, 900.0)), "-57 %");
        assert_eq!(change((350.0, 350.0)), "+0 %");
        assert_eq!(change((0.0, 5.0)), "–");
        let cells = row(&STAGES[4], (100.0, 40.0));
        assert_eq!(cells, ["end to end", "100.0", "40.0", "-60 %", "2450", "1250", "-49 %"]);
        assert_eq!(row(&STAGES[0], (0.0, 4.0)).len(), cells.len());
    }
}
