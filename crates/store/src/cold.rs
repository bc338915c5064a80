//! The cold tier: chunk files as immutable objects in a directory or an S3 bucket.
//!
//! A chunk is one object named after its id, and more of 32 MiB each if it is larger. Parts are
//! written before the first object, and are named after its checksum, so that a chunk exists
//! exactly when its first object does and parts of two writers never mix. Every object is created
//! only if it does not exist: of two writers one wins and the other finds a good copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_format::Superblock;
use matkv_types::{ChunkId, Fingerprint, PAGE_BYTES};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    ClientOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig,
};
use tokio::runtime::Runtime;

use crate::breaker::Breaker;
use crate::error::{Result, StoreError};

/// Larger objects are split.
const OBJECT_BYTES: usize = 32 << 20;

/// Where the cold tier is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdOptions {
    /// `file:///directory`, `s3://bucket/prefix` or `memory:`.
    pub url: String,
    /// Of an S3 service that is not Amazon's; keys come from `AWS_ACCESS_KEY_ID` and
    /// `AWS_SECRET_ACCESS_KEY`.
    pub endpoint: Option<String>,
    /// Longest a transfer may take.
    pub deadline: Duration,
}

/// Objects of one fingerprint.
pub struct ColdTier {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    /// Taken only when the tier is dropped.
    runtime: Option<Runtime>,
    deadline: Duration,
    breaker: Breaker,
    url: String,
    /// The directory, if it is one.
    directory: Option<std::path::PathBuf>,
}

impl Drop for ColdTier {
    /// Whoever drops it may be on a thread of another runtime, where nothing may wait.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn cold_error(what: &'static str, reason: impl std::fmt::Display) -> StoreError {
    StoreError::Cold { what, reason: reason.to_string() }
}

impl ColdTier {
    /// Opens the tier; nothing is sent yet.
    ///
    /// # Errors
    /// If the URL is not understood or the directory cannot be made.
    pub fn open(options: &ColdOptions, fingerprint: Fingerprint) -> Result<Self> {
        let (objects, prefix) = connect(options)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("cold")
            .enable_all()
            .build()
            .map_err(|e| cold_error("start", e))?;
        let name = fingerprint.to_string()[..16].to_owned();
        let prefix = Path::from_iter(prefix.parts().chain(Path::from(name).parts()));
        Ok(Self {
            objects,
            prefix,
            runtime: Some(runtime),
            deadline: options.deadline,
            breaker: Breaker::default(),
            url: options.url.clone(),
            directory: options.url.strip_prefix("file://").map(Into::into),
        })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("there until the tier is dropped")
    }

    /// What it is, for status.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether it is worth trying.
    pub fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    fn object(&self, id: &ChunkId) -> Path {
        let name = id.to_string();
        self.prefix.clone().join(&name[..2]).join(format!("{name}.kv"))
    }

    fn part(&self, id: &ChunkId, checksum: u32, number: usize) -> Path {
        let name = id.to_string();
        let part = format!("{name}.{checksum:08x}.{number}");
        self.prefix.clone().join(&name[..2]).join(part)
    }

    /// Runs one operation under the deadline and the breaker.
    fn run<T>(
        &self,
        what: &'static str,
        operation: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        if let Some(reason) = self.breaker.reason(Instant::now()) {
            return Err(cold_error(what, format!("not tried: {reason}")));
        }
        // The timer needs the runtime when it is made.
        let timed = async { tokio::time::timeout(self.deadline, operation).await };
        let outcome = self.runtime().block_on(timed);
        self.judge(what, outcome)
    }

    fn judge<T>(
        &self,
        what: &'static str,
        outcome: std::result::Result<object_store::Result<T>, tokio::time::error::Elapsed>,
    ) -> Result<T> {
        match outcome {
            Ok(Ok(value)) => {
                self.breaker.succeeded();
                Ok(value)
            }
            // An answer, though not the wished one.
            Ok(Err(object_store::Error::NotFound { ref source, .. }))
                if !source.to_string().contains("NoSuchBucket") =>
            {
                self.breaker.succeeded();
                Err(StoreError::ColdMissing)
            }
            Ok(Err(e)) => Err(self.broken(what, e.to_string())),
            Err(_) => Err(self.broken(what, format!("no answer in {} s", self.deadline.as_secs()))),
        }
    }

    fn broken(&self, what: &'static str, reason: String) -> StoreError {
        if self.breaker.failed(Instant::now(), &reason) {
            tracing::warn!("cold tier {}: {what}: {reason}; pausing", self.url);
        }
        cold_error(what, reason)
    }

    /// Stores a chunk file. Returns the superblock of what is there afterwards: another writer's,
    /// if there was one.
    ///
    /// # Errors
    /// If the store refuses, cannot be reached, or holds something else under this name.
    pub fn put(&self, id: &ChunkId, file: Vec<u8>) -> Result<Superblock> {
        let mine = Superblock::decode(&file)?;
        let checksum = mine.checksum();
        let file = bytes::Bytes::from(file);
        for (i, at) in (OBJECT_BYTES..file.len()).step_by(OBJECT_BYTES).enumerate() {
            let part = file.slice(at..(at + OBJECT_BYTES).min(file.len()));
            self.create(&self.part(id, checksum, i + 1), part)?;
        }
        let first = file.slice(..OBJECT_BYTES.min(file.len()));
        if self.create(&self.object(id), first)? {
            return Ok(mine);
        }
        let page =
            self.run("read", self.objects.get_range(&self.object(id), 0..PAGE_BYTES as u64))?;
        let theirs = Superblock::decode(&page)?;
        if theirs.chunk_id == *id && theirs.fingerprint == mine.fingerprint {
            for i in (1..file.len().div_ceil(OBJECT_BYTES)).filter(|_| theirs != mine) {
                self.delete(&self.part(id, checksum, i))?;
            }
            return Ok(theirs);
        }
        Err(cold_error("create", format!("{} is another chunk's", self.object(id))))
    }

    /// Creates an object; false if it exists.
    fn create(&self, path: &Path, bytes: bytes::Bytes) -> Result<bool> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let put = async {
            match self.objects.put_opts(path, PutPayload::from_bytes(bytes), options).await {
                Ok(_) => Ok(true),
                Err(
                    object_store::Error::AlreadyExists { .. }
                    | object_store::Error::Precondition { .. },
                ) => Ok(false),
                Err(e) => Err(e),
            }
        };
        self.run("create", put)
    }

    /// Reads a chunk file whole.
    ///
    /// # Errors
    /// [`StoreError::ColdMissing`], or why it cannot be read. The bytes are not verified.
    pub fn get(&self, id: &ChunkId) -> Result<Vec<u8>> {
        self.run("read", fetch(Arc::clone(&self.objects), self.names(id)))
    }

    /// Reads a chunk file in the background.
    pub fn get_then(
        self: &Arc<Self>,
        id: &ChunkId,
        then: impl FnOnce(Result<Vec<u8>>) + Send + 'static,
    ) {
        let (this, names) = (Arc::clone(self), self.names(id));
        self.runtime().spawn(async move {
            let fetched = fetch(Arc::clone(&this.objects), names);
            let outcome = tokio::time::timeout(this.deadline, fetched).await;
            let result = this.judge("read", outcome);
            // The tier must not be dropped on a thread of its own runtime.
            tokio::task::spawn_blocking(move || {
                drop(this);
                then(result);
            });
        });
    }

    fn names(&self, id: &ChunkId) -> Names {
        let object = self.object(id);
        Names { object, directory: self.prefix.clone().join(&id.to_string()[..2]), id: *id }
    }

    /// Removes a chunk; a missing one is no error.
    ///
    /// # Errors
    /// If the store cannot be reached.
    pub fn remove(&self, id: &ChunkId) -> Result<()> {
        let object = self.object(id);
        let size = match self.run("read", self.objects.head(&object)) {
            Ok(meta) => meta.size,
            // Only an answer with a body tells a missing chunk from a missing bucket.
            Err(StoreError::ColdMissing) => {
                return match self.run("read", self.objects.get(&object)) {
                    Ok(_) | Err(StoreError::ColdMissing) => self.remove_parts(id),
                    Err(e) => Err(e),
                };
            }
            Err(e) => return Err(e),
        };
        // A range must not be longer than what is there.
        let range = 0..size.min(PAGE_BYTES as u64);
        let page = match range.is_empty() {
            true => bytes::Bytes::new(),
            false => self.run("read", self.objects.get_range(&object, range))?,
        };
        // The first object goes first: without it there is no chunk.
        self.delete(&object)?;
        if let Ok(found) = Superblock::decode(&page) {
            for i in 1..found.file_len().div_ceil(OBJECT_BYTES) {
                self.delete(&self.part(id, found.checksum(), i))?;
            }
        }
        Ok(())
    }

    /// Removes parts whose first object was never written, or is gone.
    fn remove_parts(&self, id: &ChunkId) -> Result<()> {
        use futures_util::TryStreamExt;
        let name = id.to_string();
        let directory = self.prefix.clone().join(&name[..2]);
        let list = self.objects.list(Some(&directory)).try_collect::<Vec<_>>();
        let begins = format!("{name}.");
        let mut found = match self.run("list", list) {
            Err(StoreError::ColdMissing) => Vec::new(),
            outcome => outcome?,
        };
        found.retain(|o| o.location.filename().is_some_and(|f| f.starts_with(&begins)));
        found.iter().try_for_each(|o| self.delete(&o.location))
    }

    /// Removes what a killed writer has left of a chunk in a directory: an object is written as
    /// `NAME#N` before it gets its name, and such files are in no listing.
    pub fn remove_staged(&self, id: &ChunkId) {
        let Some(directory) = &self.directory else { return };
        let name = id.to_string();
        let directory = directory.join(self.prefix.as_ref()).join(&name[..2]);
        let begins = format!("{name}.");
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let staged = entry.file_name().to_str().is_some_and(|f| {
                let number = f.rsplit_once('#').map_or("", |(_, n)| n);
                f.starts_with(&begins) && number.parse::<u32>().is_ok()
            });
            // Whoever has removed it meanwhile has done what is wanted.
            if staged && let Err(e) = std::fs::remove_file(entry.path()) {
                tracing::debug!("{}: {e}", entry.path().display());
            }
        }
    }

    fn delete(&self, path: &Path) -> Result<()> {
        match self.run("delete", self.objects.delete(path)) {
            Err(StoreError::ColdMissing) => Ok(()),
            other => other,
        }
    }

    /// Ids of the chunks that are there: a full listing, for repair only.
    ///
    /// # Errors
    /// If the store cannot be reached.
    pub fn scan(&self) -> Result<Vec<ChunkId>> {
        use futures_util::TryStreamExt;
        let list = self.objects.list(Some(&self.prefix)).try_collect::<Vec<_>>();
        let id = |name: &str| name.strip_suffix(".kv").and_then(|n| n.parse().ok());
        let list = self.run("list", list)?;
        Ok(list.iter().filter_map(|o| o.location.filename().and_then(id)).collect())
    }
}

struct Names {
    object: Path,
    directory: Path,
    id: ChunkId,
}

async fn fetch(objects: Arc<dyn ObjectStore>, names: Names) -> object_store::Result<Vec<u8>> {
    let first = objects.get(&names.object).await?.bytes().await?;
    let mut file = Vec::from(first);
    if file.len() < OBJECT_BYTES {
        return Ok(file);
    }
    // What is not a superblock has no parts, and will not verify either.
    let Ok(found) = Superblock::decode(&file) else { return Ok(file) };
    for i in 1..found.file_len().div_ceil(OBJECT_BYTES) {
        let part = format!("{}.{:08x}.{i}", names.id, found.checksum());
        let part = objects.get(&names.directory.clone().join(part)).await?.bytes().await?;
        file.extend_from_slice(&part);
    }
    Ok(file)
}

fn connect(options: &ColdOptions) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let url = &options.url;
    if url == "memory:" {
        return Ok((Arc::new(InMemory::new()), Path::default()));
    }
    if let Some(directory) = url.strip_prefix("file://") {
        std::fs::create_dir_all(directory).map_err(|source| StoreError::File {
            what: "create",
            path: directory.into(),
            source,
        })?;
        let local =
            LocalFileSystem::new_with_prefix(directory).map_err(|e| cold_error("open", e))?;
        return Ok((Arc::new(local.with_fsync(true)), Path::default()));
    }
    let Some(rest) = url.strip_prefix("s3://") else {
        let known = "file:///directory, s3://bucket/prefix and memory:";
        return Err(cold_error("open", format!("{url:?} is not one of {known}")));
    };
    // Fails only if one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let retry =
        RetryConfig { max_retries: 2, retry_timeout: options.deadline, ..RetryConfig::default() };
    let mut client = ClientOptions::new()
        .with_connect_timeout(Duration::from_secs(2))
        .with_timeout(options.deadline);
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_retry(retry);
    if let Some(endpoint) = &options.endpoint {
        let plain = endpoint.starts_with("http://");
        client = client.with_allow_http(plain);
        // Otherwise Amazon's metadata service would be asked for some.
        if builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_none() {
            let keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            return Err(cold_error("open", format!("there are no keys: set {keys}")));
        }
        builder = builder.with_endpoint(endpoint);
    }
    let s3 = builder.with_client_options(client).build().map_err(|e| cold_error("open", e))?;
    Ok((Arc::new(s3), Path::from(prefix)))
}
