//! S3 peers on loopback, and processes that have their keys.
//!
//! Keys come from the environment, which a test must not change: the parts of a test run in
//! processes of their own, made from the same program.

use std::io::BufRead;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use matkv_format::ChunkFile;
use matkv_store::{
    ColdOptions, ColdTier, ColdTierOptions, Identity, Result, StoreError, TierOptions,
};
use matkv_types::{ChunkId, ContentId, Encoding, KvDtype, KvLayout, KvShape};
use object_store::ObjectStore;

use crate::common::{FP, identity};

const PART: &str = "S3_TEST_PART";
const PLACE: &str = "S3_TEST_PLACE";
/// How long anything may take on a busy machine before it counts as stuck.
const STUCK: Duration = Duration::from_secs(60);

/// Asks again and again until there is an answer.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < STUCK, "waited {STUCK:?} in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn reason(outcome: Result<impl Sized>) -> String {
    match outcome {
        Err(StoreError::Cold { reason, .. }) => reason,
        Err(e) => panic!("not the cold tier's: {e}"),
        Ok(_) => panic!("it works"),
    }
}

/// What came of it, unless the cold tier failed.
pub fn completed<T>(outcome: Result<T>) -> Option<T> {
    match outcome {
        Err(StoreError::Cold { .. }) => None,
        outcome => Some(outcome.unwrap()),
    }
}

pub fn is_missing(outcome: Result<impl Sized>) -> bool {
    matches!(outcome, Err(StoreError::ColdMissing))
}

/// A chunk file of so many layers and rows; `seed` makes it another write of the same chunk.
pub fn large(layers: usize, rows: usize, seed: u64) -> (ChunkId, Vec<u8>) {
    of_shape(KvShape { layers, kv_heads: 8, head_dim: 128 }, rows, seed)
}

/// A chunk file of exactly one full object.
pub fn full() -> (ChunkId, Vec<u8>) {
    let made = of_shape(KvShape { layers: 21, kv_heads: 5, head_dim: 128 }, 624, 0);
    assert_eq!(made.1.len(), 32 << 20);
    made
}

fn of_shape(shape: KvShape, rows: usize, seed: u64) -> (ChunkId, Vec<u8>) {
    let tokens: Vec<u32> = (0..rows as u32).collect();
    let id = ChunkId::new(FP, "default", ContentId::of_tokens(&tokens));
    let identity = Identity { shape, ..identity(FP) };
    let mut state = seed + 1;
    // No two pages are alike.
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()
    };
    let words = KvLayout::new(shape, KvDtype::Bf16, rows).total_bytes() / 8;
    let mut rows: Vec<u8> = (0..words).flat_map(|_| next()).collect();
    let mut out = vec![0; ChunkFile::len(shape, KvDtype::Bf16, tokens.len())];
    let expect = identity.expectation(id, &tokens);
    ChunkFile::encode(&mut rows, &mut out, &expect, KvDtype::Bf16).unwrap();
    (id, out)
}

/// Where a part finds its peer.
#[derive(Clone, Debug)]
pub struct Place {
    pub endpoint: String,
    script: PathBuf,
    dir: PathBuf,
}

/// What a part of a test is allowed to do.
#[derive(Clone, Copy, Debug)]
pub enum Keys {
    Good,
    WrongSecret,
    Unknown,
    None,
}

/// A part of a test: its name, its keys, and what it does.
pub type Part = (&'static str, Keys, fn(&Place));

impl Place {
    /// An endpoint that is no peer's.
    pub fn at(endpoint: String) -> Self {
        Self { endpoint, script: PathBuf::new(), dir: PathBuf::new() }
    }

    fn script(&self, command: &str) -> Result<String, String> {
        let mut run = Command::new(&self.script);
        if std::env::var_os("MATKV_CEPH_STORE").is_none() {
            run.env("MATKV_CEPH_STORE", "memstore");
        }
        let output = run.arg(command).arg(&self.dir).stdin(Stdio::null()).output();
        let output = output.unwrap_or_else(|e| panic!("{}: {e}", self.script.display()));
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }

    pub fn stop_gateway(&self) {
        self.script("stop-gateway").unwrap();
    }

    pub fn start_gateway(&self) {
        self.script("start-gateway").unwrap();
    }

    /// The tier at a prefix of a bucket.
    pub fn at_url(&self, url: &str, deadline: Duration) -> ColdTierOptions {
        let endpoint = Some(self.endpoint.clone());
        let place = ColdOptions { url: url.into(), endpoint, deadline };
        let tier = TierOptions { encoding: Encoding::EXACT, level: 3, capacity: None };
        ColdTierOptions { place, tier }
    }

    /// The tier at a prefix of the bucket.
    pub fn cold(&self, prefix: &str) -> ColdTierOptions {
        self.at_url(&format!("s3://matkv/{prefix}"), Duration::from_secs(30))
    }

    pub fn tier(&self, prefix: &str) -> ColdTier {
        ColdTier::open(&self.cold(prefix).place, FP).unwrap()
    }

    /// Objects below a prefix, and their sizes.
    pub fn objects(&self, prefix: &str) -> Vec<(String, u64)> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let s3 = object_store::aws::AmazonS3Builder::from_env()
            .with_bucket_name("matkv")
            .with_endpoint(&self.endpoint)
            .with_allow_http(true)
            .build()
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let prefix = object_store::path::Path::from(prefix);
        let list = runtime.block_on(s3.list(Some(&prefix)).try_collect::<Vec<_>>()).unwrap();
        list.into_iter().map(|o| (o.location.to_string(), o.size)).collect()
    }

    /// Runs parts of test `test` one after the other; in a process for one of them, only that.
    pub fn run(&self, test: &str, parts: &[Part]) {
        let failed: Vec<&str> = parts
            .iter()
            .filter(|(part, keys, _)| {
                let started = Instant::now();
                let status = self.process(test, part, *keys).status().unwrap();
                eprintln!("{test}: {part}: {:.1} s", started.elapsed().as_secs_f64());
                !status.success()
            })
            .map(|(part, ..)| *part)
            .collect();
        assert!(failed.is_empty(), "{test}: failed: {failed:?}");
    }

    fn process(&self, test: &str, part: &str, keys: Keys) -> Command {
        let keys = match keys {
            Keys::Good => Some(("matkv-test-key", "matkv-test-secret")),
            Keys::WrongSecret => Some(("matkv-test-key", "wrong")),
            Keys::Unknown => Some(("nobody", "matkv-test-secret")),
            Keys::None => None,
        };
        let mut run = Command::new(std::env::current_exe().unwrap());
        // Other settings and proxies are not for a peer on loopback.
        for (name, _) in
            std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("AWS_"))
        {
            run.env_remove(name);
        }
        let place =
            [&self.endpoint, &self.script.display().to_string(), self.dir.to_str().unwrap()]
                .join("\n");
        run.args(["--exact", test, "--nocapture"])
            .envs(keys.map(|(key, _)| ("AWS_ACCESS_KEY_ID", key)))
            .envs(keys.map(|(_, secret)| ("AWS_SECRET_ACCESS_KEY", secret)))
            .envs([(PART, part), (PLACE, &place), ("NO_PROXY", "127.0.0.1")])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        run
    }
}

/// In a process for a part: does it. False if this is none.
pub fn is_part(parts: &[Part]) -> bool {
    let Ok(name) = std::env::var(PART) else { return false };
    let place = std::env::var(PLACE).unwrap();
    let [endpoint, script, dir] = place.split('\n').collect::<Vec<_>>().try_into().unwrap();
    let place = Place { endpoint: endpoint.into(), script: script.into(), dir: dir.into() };
    let (.., part) = parts.iter().find(|(part, ..)| *part == name).unwrap();
    part(&place);
    true
}

/// A running peer; gone with this, or with this process.
pub struct Peer {
    place: Place,
    keeper: Child,
}

impl Peer {
    /// Starts it; nothing, after saying so, if it is not installed.
    ///
    /// # Panics
    /// If it does not start, or is not installed and `MATKV_REQUIRE_S3` is set.
    pub fn start(script: &str) -> Option<Self> {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts");
        let script = scripts.join(script).canonicalize().unwrap();
        let dir = tempfile::Builder::new().prefix("matkv-s3-").tempdir().unwrap().keep();
        // Its end of the pipe is closed when this process ends, however it does.
        let keeper = Command::new("sh")
            .args(["-c", r#"read -r _; "$0" down "$1" && rm -rf "$1""#])
            .args([&script, &dir])
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut peer = Self { place: Place { endpoint: String::new(), script, dir }, keeper };
        let said = match peer.place.script("up") {
            Ok(said) => said,
            Err(why) => {
                let skips =
                    why.contains(" is missing") && std::env::var_os("MATKV_REQUIRE_S3").is_none();
                assert!(skips, "{why}");
                eprintln!("skipped: {why}");
                return None;
            }
        };
        let endpoint = said
            .as_bytes()
            .lines()
            .find_map(|l| Some(l.unwrap().strip_prefix("endpoint=")?.into()));
        peer.place.endpoint = endpoint.unwrap_or_else(|| panic!("no endpoint: {said}"));
        Some(peer)
    }

    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        match self.keeper.wait() {
            Ok(status) if status.success() => {}
            other => eprintln!("{} is left: {other:?}", self.place.dir.display()),
        }
    }
}
