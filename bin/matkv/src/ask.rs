//! `matkv ask`: one question, streamed; or both modes, compared.

use std::process::ExitCode;

use anyhow::Context;
use matkv_api::Client;
use matkv_api::v1::{
    Finished, GenerateRequest, Message, Started, Timings, Usage, generate_event::Event,
};
use matkv_config::Config;

use crate::args::{AskOptions, Format};
use crate::out::{say, say_part};
use crate::render;

/// Everything a finished request has said.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<u32>,
    pub started: Started,
    pub reason: String,
    pub usage: Usage,
    pub timings: Timings,
}

pub async fn run(
    config: &Config,
    options: &AskOptions,
    format: Format,
) -> anyhow::Result<ExitCode> {
    let client = matkv_api::connect(&config.socket()).await?;
    if options.verify {
        return verify(client, options, format).await;
    }
    let streaming = format == Format::Text;
    let answer = generate(client, request(options), |text| {
        if streaming {
            say_part!("{text}");
        }
        Ok(())
    })
    .await?;
    match format {
        Format::Text => {
            say!();
            render::sources(&answer);
            render::usage(&answer);
        }
        Format::Json => say!("{}", render::answer_json(&answer)),
    }
    Ok(ExitCode::SUCCESS)
}

fn request(o: &AskOptions) -> GenerateRequest {
    let message =
        |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    let mut request = GenerateRequest {
        document_ids: o.document.clone(),
        chunk_ids: o.chunk.clone(),
        mode: o.mode.clone(),
        top_k: o.top_k,
        max_new_tokens: o.max_new_tokens,
        temperature: o.temperature,
        top_p: o.top_p,
        seed: o.seed,
        stop: o.stop.clone(),
        cold: o.cold,
        ..GenerateRequest::default()
    };
    match &o.system {
        Some(system) => {
            request.messages = vec![message("system", system), message("user", &o.question)];
        }
        None => request.question.clone_from(&o.question),
    }
    request
}

/// Runs a request to its end, handing text on as it comes.
pub async fn generate(
    mut client: Client,
    request: GenerateRequest,
    mut on_text: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Answer> {
    let stream = client.generate(request).await.map_err(|s| anyhow::anyhow!("{}", s.message()))?;
    let mut stream = stream.into_inner();
    let mut answer = Answer::default();
    let mut finished = None;
    while let Some(event) =
        stream.message().await.map_err(|s| anyhow::anyhow!("{}", s.message()))?
    {
        match event.event {
            Some(Event::Started(started)) => answer.started = started,
            Some(Event::Text(text)) => {
                on_text(&text.text)?;
                answer.text.push_str(&text.text);
                answer.tokens.extend(text.token_ids);
            }
            Some(Event::Finished(f)) => finished = Some(f),
            None => {}
        }
    }
    let Finished { reason, usage, timings } =
        finished.context("the stream ended without a result")?;
    answer.reason = reason;
    answer.usage = usage.unwrap_or_default();
    answer.timings = timings.unwrap_or_default();
    Ok(answer)
}

async fn verify(client: Client, o: &AskOptions, format: Format) -> anyhow::Result<ExitCode> {
    let run = |mode: &str| {
        let mut request = request(o);
        request.mode = mode.into();
        request.return_logits = true;
        generate(client.clone(), request, |_| Ok(()))
    };
    let vanilla = run("vanilla").await?;
    let reused = run(if o.mode == "vanilla" { "matkv" } else { &o.mode }).await?;
    let agreement = Agreement::of(&vanilla, &reused);
    match format {
        Format::Json => say!(
            "{}",
            serde_json::json!({
                "vanilla": render::answer_json(&vanilla),
                "reused": render::answer_json(&reused),
                "kl": agreement.kl, "same_top1": agreement.same_top1,
                "max_difference": agreement.max_difference, "same_answer": agreement.same_answer,
                "common_tokens": agreement.common_tokens,
            })
        ),
        Format::Text => {
            say!("vanilla: {}", vanilla.text.trim());
            say!("{}: {}", reused.usage.mode, reused.text.trim());
            render::sources(&reused);
            say!(
                "first token: KL {:.5}, same top-1: {}, largest logit difference {:.4}",
                agreement.kl,
                render::yes_no(agreement.same_top1),
                agreement.max_difference
            );
            say!(
                "answer: {}; the first {} tokens agree",
                if agreement.same_answer { "identical" } else { "different" },
                agreement.common_tokens
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// How close two runs of the same prompt are.
pub struct Agreement {
    /// KL(vanilla ‖ reused) of the first answer token, in nats.
    pub kl: f64,
    pub same_top1: bool,
    pub max_difference: f64,
    pub same_answer: bool,
    /// Answer tokens before the first difference.
    pub common_tokens: usize,
}

impl Agreement {
    pub fn of(vanilla: &Answer, reused: &Answer) -> Self {
        let (a, b) = (&vanilla.started.logits, &reused.started.logits);
        let (la, lb) = (log_softmax(a), log_softmax(b));
        let kl = la.iter().zip(&lb).map(|(x, y)| x.exp() * (x - y)).sum();
        let top = |v: &[f32]| v.iter().enumerate().max_by(|x, y| x.1.total_cmp(y.1)).map(|m| m.0);
        let difference = a.iter().zip(b).map(|(x, y)| f64::from((x - y).abs()));
        let common = vanilla.tokens.iter().zip(&reused.tokens).take_while(|(x, y)| x == y).count();
        Self {
            kl,
            same_top1: top(a) == top(b),
            max_difference: difference.fold(0.0, f64::max),
            same_answer: vanilla.tokens == reused.tokens,
            common_tokens: common,
        }
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - top).exp()).sum();
    logits.iter().map(|x| f64::from(x - top) - sum.ln()).collect()
}
