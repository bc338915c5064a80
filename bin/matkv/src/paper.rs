//! `matkv bench report --paper`: latency by phase in the shape of the MatKV paper's table, with the
//! published figures beside it.
//!
//! Those are of other hardware and models; only the direction and size of a change compare.

use anyhow::Context;
use matkv_api::Client;
use matkv_api::v1::{GenerateRequest, Timings};

use crate::args::ReportOptions;
use crate::ask::generate;
use crate::bench::{ingest_all, lines};
use crate::demo::median;
use crate::render::table;

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

const CLAIMS: &str = "\
published: MatKV (ICDE 2026), LLaMA-70B, one H100, 4 × NVMe in RAID-0, TurboRAG's documents; its
  256 requests at batch 8 take 546 s vanilla, 306 s with MatKV, 285 s with overlap
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

/// Asks every question in both modes, alternated, and prints the table.
pub async fn measure(client: Client, o: &ReportOptions) -> anyhow::Result<String> {
    ingest_all(&client, &o.corpus, o.documents).await?;
    let path = o.questions.as_deref().context("--paper needs --questions")?;
    let questions: Vec<String> = lines(path, "query")?.into_iter().take(o.count).collect();
    let modes = ["vanilla", "linked(32)"];
    let mut timings = [Vec::new(), Vec::new()];
    for (i, question) in questions.iter().enumerate() {
        for step in 0..modes.len() {
            let m = (i + step) % modes.len();
            let request = GenerateRequest {
                question: question.clone(),
                mode: modes[m].into(),
                max_new_tokens: Some(ANSWER),
                cold: true,
                ..GenerateRequest::default()
            };
            timings[m].push(generate(client.clone(), request, |_| Ok(())).await?.timings);
        }
        eprintln!("question {}/{}", i + 1, questions.len());
    }
    let of = |stage: &Stage| {
        let median = |m: usize| median(timings[m].iter().map(stage.phase).collect());
        row(stage, (median(0), median(1)))
    };
    let rows: Vec<_> = STAGES.iter().map(of).collect();
    let head = ["ms", "vanilla", "MatKV", "change", "published", "MatKV", "change"];
    Ok(format!("{}{} questions, {}\n{CLAIMS}", table(&head, &rows), questions.len(), modes[1]))
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
