//! The process: model, threads, supervision.

use std::sync::Arc;
use std::time::Duration;

use matkv_actors::{Outcome, Policy, StopFlag, ThreadSpec, supervise};
use matkv_config::Config;
use matkv_model::{LanguageModel, PromptTexts, model_path};

use crate::error::DecoderError;
use crate::session::{self, Side};

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
    let path = model_path(&config.cache_dir, &config.model)?;
    let model = LanguageModel::open(&path, Some(&config.cache_dir))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| DecoderError::Threads(e.to_string()))?;
    runtime.block_on(supervised(config.clone(), options, Arc::new(model)))
}

async fn supervised(
    config: Config,
    options: Options,
    model: Arc<LanguageModel>,
) -> Result<(), DecoderError> {
    let stop = StopFlag::default();
    // A session that broke cannot be taken up again in this process; the loader, or the service
    // manager, starts another.
    let session = ThreadSpec::new("session", Policy::Fatal, move |stop| {
        sessions(&config, options, &model, &stop).map_err(|e| e.to_string())
    });
    let threads = |e: String| DecoderError::Threads(e);
    let mut tree = supervise(vec![session], stop.clone()).await.map_err(threads)?;
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(|e| threads(e.to_string()))?;
    tokio::select! {
        _ = tree.ended() => {}
        _ = term.recv() => {}
        // Ctrl-C in a terminal reaches the whole process group: `matkv up` stops us in order.
        _ = tokio::signal::ctrl_c(), if !options.exit_with_loader => {}
    }
    match tree.stop().await {
        Outcome::Failed { child, reason } if !stopped_with_loader(options, &reason) => {
            Err(DecoderError::Threads(format!("{child}: {reason}")))
        }
        _ => Ok(()),
    }
}

/// What the session thread returns when it has nothing left to do.
fn stopped_with_loader(options: Options, reason: &str) -> bool {
    options.exit_with_loader && reason == "returned"
}

fn sessions(
    config: &Config,
    options: Options,
    model: &LanguageModel,
    stop: &StopFlag,
) -> Result<(), DecoderError> {
    let texts =
        PromptTexts { system: config.system.clone(), introduction: config.introduction.clone() };
    let prefix = model.prefix(&texts)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(Config::threads(config.decoder_threads))
        .thread_name(|i| format!("decode-{i}"))
        .build()
        .map_err(|e| DecoderError::Threads(e.to_string()))?;
    let side = Side {
        model,
        fingerprint: model.fingerprint(&prefix),
        batch_size: config.batch_size,
        runtime: &config.runtime_dir,
        pool: &pool,
    };
    while !stop.is_raised() {
        let had_session = session::run(&side, stop)?;
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
