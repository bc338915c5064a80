//! Programs under test: where they are, how they are run and killed.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::files::entries;
use crate::wait::DEADLINE;

/// `target/<profile>`, where the workspace's programs lie: the test itself is in its `deps`.
pub(crate) fn profile_dir() -> PathBuf {
    let own = std::env::current_exe().expect("the path of this test");
    let deps = own.parent().expect("its directory");
    if deps.ends_with("deps") { deps.parent().unwrap_or(deps) } else { deps }.to_owned()
}

/// A program of the workspace.
///
/// # Panics
/// If it has not been built.
pub fn program(name: &str) -> PathBuf {
    let path = profile_dir().join(name);
    assert!(
        path.exists(),
        "{} is missing; the end-to-end tests run real processes: `cargo build --workspace --bins`",
        path.display()
    );
    path
}

/// A program of the workspace that takes nothing from the environment of the tests.
pub(crate) fn isolated(name: &str) -> Command {
    let mut command = Command::new(program(name));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MATKV_") && name != "MATKV_ISA" {
            command.env_remove(name);
        }
    }
    command.env("XDG_DATA_HOME", "/nonexistent").env("XDG_RUNTIME_DIR", "/nonexistent");
    command
}

/// `matkv` with exactly these settings.
pub(crate) fn matkv(settings: &[String]) -> Command {
    let mut command = isolated("matkv");
    for setting in settings {
        command.args(["--set", setting]);
    }
    command
}

/// What a program has printed so far.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Follows a pipe to its end, on a thread of its own.
    pub fn follow(mut pipe: impl Read + Send + 'static) -> (Self, std::thread::JoinHandle<()>) {
        let log = Self::default();
        let bytes = Arc::clone(&log.0);
        let thread = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut piece) {
                let mut all = bytes.lock().unwrap_or_else(PoisonError::into_inner);
                all.extend_from_slice(&piece[..n]);
            }
        });
        (log, thread)
    }

    pub fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct Output {
    /// Exit status; none if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// Runs a program to its end.
///
/// # Panics
/// If it does not end before [`DEADLINE`].
pub fn run_with_input(mut command: Command, input: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let (out, out_thread) = Log::follow(child.stdout.take().expect("piped"));
    let (err, err_thread) = Log::follow(child.stderr.take().expect("piped"));
    // A program that refuses before it reads closes the pipe; that is no failure of the test.
    let _ = child.stdin.take().expect("piped").write_all(input);
    let Some(status) = wait(&mut child, DEADLINE) else {
        let _ = child.kill();
        let _ = child.wait();
        panic!("{command:?} has not ended after {DEADLINE:?}:\n{}{}", out.text(), err.text());
    };
    let _ = (out_thread.join(), err_thread.join());
    Output { code: status.code(), out: out.text(), err: err.text() }
}

/// A running program that is killed when the test loses it.
pub struct Running {
    child: Child,
    out: Log,
    err: Log,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let (out, _) = Log::follow(child.stdout.take().expect("piped"));
        let (err, _) = Log::follow(child.stderr.take().expect("piped"));
        Self { child, out, err }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<Output> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(Output { code: status.code(), out: self.out.text(), err: self.err.text() })
    }

    /// What it has printed so far, both streams.
    pub fn said(&self) -> String {
        self.out.text() + &self.err.text()
    }

    /// Standard output so far.
    pub fn out(&self) -> String {
        self.out.text()
    }

    /// Standard error so far.
    pub fn err(&self) -> String {
        self.err.text()
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits for a child, by polling.
fn wait(child: &mut Child, deadline: Duration) -> Option<std::process::ExitStatus> {
    let started = Instant::now();
    while started.elapsed() < deadline {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Sends a signal, e.g. `KILL`, to processes at once.
///
/// # Panics
/// If one of them does not exist.
pub fn signal(name: &str, pids: &[u32]) {
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    let output = run_with_input(kill(name, &pids), b"");
    assert_eq!(output.code, Some(0), "kill -{name} {pids:?}: {}", output.err);
}

fn kill(name: &str, pids: &[String]) -> Command {
    let mut command = Command::new("kill");
    command.arg(format!("-{name}")).args(pids);
    command
}

/// Whether a process runs; one that is dead and not yet reaped does not.
pub fn is_alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // `pid (name) state …`, where the name may contain anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Children that a process, whichever of its threads, has started and that are alive.
pub fn children(pid: u32) -> Vec<u32> {
    let threads = entries(format!("/proc/{pid}/task").as_ref());
    let lists = threads.iter().filter_map(|t| std::fs::read_to_string(t.join("children")).ok());
    let pids: Vec<u32> = lists
        .flat_map(|l| l.split_whitespace().map(str::parse).collect::<Vec<_>>())
        .flatten()
        .collect();
    pids.into_iter().filter(|pid| is_alive(*pid)).collect()
}

/// Descriptors a process has open.
pub fn descriptors(pid: u32) -> usize {
    entries(format!("/proc/{pid}/fd").as_ref()).len()
}

/// The shared-memory segments a process has mapped.
pub fn segments(pid: u32) -> Vec<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut found: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| line.find("/dev/shm/matkv-").map(|at| &line[at..]))
        .map(|path| Path::new(path.trim_end_matches(" (deleted)")).to_owned())
        .collect();
    found.sort();
    found.dedup();
    found
}
