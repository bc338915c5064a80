//! `matkv store`: the KV of documents as one file.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use matkv_api::v1::{BundlePart, ExportRequest};
use matkv_config::{Config, format_bytes};
use matkv_loader_core::{export, offline};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::args::{Format, StoreCommand};
use crate::chunks::said;
use crate::out::say;

/// Bytes of a part.
const PART_BYTES: usize = 1 << 20;

pub fn run(
    runtime: &Runtime,
    config: &Config,
    command: &StoreCommand,
    format: Format,
) -> anyhow::Result<ExitCode> {
    match command {
        StoreCommand::Export { file, document } => {
            export_to(runtime, config, file, document, format)
        }
        StoreCommand::Import { file } => import_from(runtime, config, file, format),
    }
}

/// Writes beside the target and renames, so that a bundle is whole or not there.
fn export_to(
    runtime: &Runtime,
    config: &Config,
    file: &str,
    documents: &[String],
    format: Format,
) -> anyhow::Result<ExitCode> {
    if file == "-" {
        fill(runtime, config, documents, &mut std::io::stdout().lock())?;
        return Ok(ExitCode::SUCCESS);
    }
    let target = Path::new(file);
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = tempfile::NamedTempFile::new_in(parent)
        .with_context(|| format!("cannot write in {}", parent.display()))?;
    fill(runtime, config, documents, &mut temporary)?;
    temporary.as_file().sync_all()?;
    let bytes = temporary.as_file().metadata()?.len();
    temporary.persist(target).with_context(|| format!("cannot write {file}"))?;
    if format == Format::Json {
        say!("{}", json!({"file": file, "bytes": bytes}));
    } else {
        say!("{file}: {}", format_bytes(bytes));
    }
    Ok(ExitCode::SUCCESS)
}

fn fill(
    runtime: &Runtime,
    config: &Config,
    documents: &[String],
    to: &mut impl Write,
) -> anyhow::Result<()> {
    let Ok(mut client) = runtime.block_on(matkv_api::connect_admin(&config.socket())) else {
        let store = offline::open(config, None)?;
        export(&store, documents, to).map_err(|e| anyhow!("{e}"))?;
        return Ok(());
    };
    runtime.block_on(async {
        let request = ExportRequest { document_ids: documents.to_vec() };
        let mut parts = client.export(request).await.map_err(said)?;
        while let Some(part) = parts.get_mut().message().await.map_err(said)? {
            to.write_all(&part.data)?;
        }
        to.flush()?;
        Ok(())
    })
}

fn import_from(
    runtime: &Runtime,
    config: &Config,
    file: &str,
    format: Format,
) -> anyhow::Result<ExitCode> {
    let mut from: Box<dyn Read + Send> = if file == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(BufReader::new(File::open(file).with_context(|| format!("cannot open {file}"))?))
    };
    let done = runtime.block_on(async {
        let mut client = matkv_api::connect_admin(&config.socket()).await?;
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let reading = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
            loop {
                let mut data = Vec::with_capacity(PART_BYTES);
                from.by_ref().take(PART_BYTES as u64).read_to_end(&mut data)?;
                if data.is_empty() || sender.blocking_send(BundlePart { data }).is_err() {
                    return Ok(());
                }
            }
        });
        let parts = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let done = client.import(parts).await.map_err(said)?;
        reading.await?.with_context(|| format!("cannot read {file}"))?;
        anyhow::Ok(done.into_inner())
    })?;
    if format == Format::Json {
        say!(
            "{}",
            json!({
                "documents": done.documents, "chunks": done.chunks,
                "chunks_known": done.chunks_known, "bytes": done.bytes,
            })
        );
    } else {
        say!(
            "{} documents, {} chunks ({}), {} were there",
            done.documents,
            done.chunks,
            format_bytes(done.bytes),
            done.chunks_known
        );
    }
    Ok(ExitCode::SUCCESS)
}
