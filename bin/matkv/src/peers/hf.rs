//! Hugging Face transformers doing what MatKV's published code does: the past keys and values of
//! every chunk loaded from disk, concatenated, and the question prefilled over them.
//!
//! `hf_matkv.py` says "ready" and then answers every line with the milliseconds of one request, so
//! that both sides take turns; it waits on its standard input while ours is measured.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail, ensure};
use matkv_api::Client;
use serde_json::json;

use super::Bench;
use super::llama::Running;
use super::serving::{Prompt, ask, ask_cold};
use crate::figures::Figure;
use crate::pair::with_private;

/// The script, running.
struct Script {
    _running: Running,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Script {
    fn start(peers: &Path, job: &Path, threads: usize) -> anyhow::Result<Self> {
        let mut command = Command::new(peers.join("venv/bin/python"));
        command.arg(peers.join("hf_matkv.py")).arg(job).env("OMP_NUM_THREADS", threads.to_string());
        // What it prints while it reads the model.
        command.envs([("TQDM_DISABLE", "1"), ("TRANSFORMERS_VERBOSITY", "error")]);
        let mut running = Running::with_pipes(&mut command)?;
        let (input, output) = running.pipes().context("the script has no pipes")?;
        Ok(Self { _running: running, input, output: BufReader::new(output) })
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "hf_matkv.py ended; its messages are above");
        Ok(line.trim().to_owned())
    }

    /// Milliseconds of one request.
    fn measure(&mut self) -> anyhow::Result<f64> {
        self.input.write_all(b"go\n")?;
        let line = self.line()?;
        line.parse().with_context(|| format!("hf_matkv.py says {line:?}"))
    }
}

impl Bench<'_> {
    pub async fn hf(&mut self) -> anyhow::Result<()> {
        let peers = self.llama.dir().to_owned();
        if !peers.join("torch.done").exists() {
            bail!(
                "PyTorch is not installed (it comes with gigabytes of CUDA libraries that it does not \
                 start without): run benches/peers/install.sh --torch"
            );
        }
        let (resolved, store) = (self.resolved, self.scratch()?);
        let stop = self.stop.clone();
        with_private(resolved, store.path(), &[], &stop, async |client, _| {
            let (_corpus, prompt) = self.prompt(&client, 0).await?;
            self.hf_rounds(&client, &peers, &prompt).await
        })
        .await
    }

    async fn hf_rounds(
        &mut self,
        client: &Client,
        peers: &Path,
        prompt: &Prompt,
    ) -> anyhow::Result<()> {
        let dir = self.scratch()?;
        let job = dir.path().join("job.json");
        let text = json!({
            "model": peers.join("models/BF16.gguf"), "dir": dir.path(),
            "prefix": self.speed()?.prefix(), "chunks": prompt.chunks, "rest": prompt.rest,
            "threads": self.threads,
        });
        std::fs::write(&job, text.to_string())?;
        let mut script = Script::start(peers, &job, self.threads)?;
        self.progress(format_args!("transformers: chunks to disk"))?;
        let ready = script.line()?;
        ask(client, "linked(32)").await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..self.options.rounds {
            self.progress(format_args!("round {}", round + 1))?;
            ours.push(ask_cold(client, "linked(32)", &prompt.files).await?);
            theirs.push(script.measure()?);
        }
        self.figures.push(Figure::median("ttft_ms[transformers]", &theirs, "ms"));
        self.ratio("ttft_hf_matkv_over_ours_linked32", &theirs, &ours);
        self.notes.push(format!("transformers: {ready}; retrieval on our side only"));
        Ok(())
    }
}

impl Running {
    fn with_pipes(command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::start(command)
    }
}
