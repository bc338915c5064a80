//! The process: model, threads, supervision.

use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_actors::{Outcome, Policy, Pulse, StopFlag, ThreadSpec, Watch, supervise};
use matkv_config::Config;
use matkv_model::{LanguageModel, Phase, PromptTexts, Team, model_path};
use matkv_sys::{bind_thread, check_cores, let_others_go_first};
use matkv_telemetry::service;

use crate::batch::Limits;
use crate::error::DecoderError;
use crate::session::{self, Decoder};

/// How the decoder was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// End when the session ends: the loader started this process and starts the next one.
    pub exit_with_loader: bool,
}

/// Runs until a signal, a fatal error, or (with `exit_with_loader`) the end of the session.
///
/// # Errors
/// If the model cannot be opened, the loader refuses this decoder, or a thread fails for good.
pub fn run(config: &Config, options: Options) -> Result<(), DecoderError> {
    // Sequences that wait while another is prefilled are decoded together afterwards (ADR 0020).
    let_others_go_first(config.decoder_nice);
    check_cores(&config.decoder_cores)
        .map_err(|e| DecoderError::Threads(format!("threads.decoder_cores: {e}")))?;
    let path = model_path(&config.cache_dir, &config.model)?;
    let model =
        LanguageModel::open_for(&path, Some(&config.cache_dir), config.precision, Phase::Decode)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| DecoderError::Threads(e.to_string()))?;
    let outcome = runtime.block_on(supervised(config.clone(), options, Arc::new(model)));
    runtime.shutdown_background();
    outcome
}

async fn supervised(
    config: Config,
    options: Options,
    model: Arc<LanguageModel>,
) -> Result<(), DecoderError> {
    let stop = StopFlag::default();
    let stall = config.stall;
    // A session that broke cannot be taken up again in this process; the loader, or the service
    // manager, starts another.
    let session = ThreadSpec::new("session", Policy::Fatal, move |stop, pulse| {
        sessions(&config, options, &model, &stop, pulse).map_err(|e| e.to_string())
    });
    let threads = |e: String| DecoderError::Threads(e);
    let mut tree = supervise(vec![session], stop.clone()).await.map_err(threads)?;
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(|e| threads(e.to_string()))?;
    service::ready("waiting for a loader");
    let feeding = tokio::spawn(feed_watchdog(tree.watch(stall)));
    tokio::select! {
        _ = tree.ended() => {}
        _ = term.recv() => {}
        // Ctrl-C in a terminal reaches the whole process group: a loader that started us stops us
        // when it has drained.
        () = interrupted(options) => {}
    }
    service::stopping("stopping");
    let outcome = tree.stop().await;
    feeding.abort();
    match outcome {
        Outcome::Failed { child, reason } => {
            Err(DecoderError::Threads(format!("{child}: {reason}")))
        }
        // Under a loader that started it, the decoder ends with its session.
        _ => Ok(()),
    }
}

/// Ends with a Ctrl-C that is meant for this process; others are caught and ignored.
async fn interrupted(options: Options) {
    loop {
        let caught = tokio::signal::ctrl_c().await;
        if caught.is_err() || !options.exit_with_loader {
            return;
        }
    }
}

/// Tells the service manager that every thread gets on, as long as it does.
async fn feed_watchdog(mut watch: Watch) {
    let Some(period) = service::watchdog() else { return };
    let mut last = Instant::now();
    loop {
        tokio::time::sleep((period / 4).min(Duration::from_millis(500))).await;
        let passed = last.elapsed();
        last = Instant::now();
        match watch.look(passed) {
            None => service::alive(),
            Some(stuck) => tracing::error!("thread {stuck} makes no progress"),
        }
    }
}

fn sessions(
    config: &Config,
    options: Options,
    model: &LanguageModel,
    stop: &StopFlag,
    pulse: &Arc<Pulse>,
) -> Result<(), DecoderError> {
    let texts =
        PromptTexts { system: config.system.clone(), introduction: config.introduction.clone() };
    let prefix = model.prefix(&texts)?;
    let failed = |e: &dyn std::fmt::Display| DecoderError::Threads(e.to_string());
    let cores = config.decoder_cores.clone();
    bind_thread(&cores, 0).map_err(|e| failed(&e))?;
    // They were tried at the start.
    let start = move |i| drop(bind_thread(&cores, i));
    let team = Team::with_start(Config::threads(config.decoder_threads), "decode", start)
        .map_err(|e| failed(&e))?;
    let decoder = Decoder {
        model,
        fingerprint: model.fingerprint(&prefix),
        limits: Limits { sequences: config.batch_size, rows: config.batch_tokens },
        stall: config.stall,
        runtime: &config.runtime_dir,
        team: &team,
        pulse,
    };
    while !stop.is_raised() {
        let had_session = session::run(&decoder, stop)?;
        if had_session && options.exit_with_loader {
            return Ok(());
        }
        if !had_session {
            // `connect_control` has waited already; this only bounds a loader that hangs up at
            // once, again and again.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}
