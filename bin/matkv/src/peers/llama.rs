//! llama.cpp's programs as child processes: one-shot benchmarks, and a server on loopback.
//!
//! A child is ended by its pid when its handle is dropped, and dies with this process. Everything
//! here blocks, and gives up when the run is stopped.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use matkv_loader_core::process::die_with_parent;
use serde_json::{Value, json};

use crate::stop::Stop;

/// Weight types it is measured with.
pub const TYPES: [&str; 3] = ["Q4_1", "Q8_0", "BF16"];
/// How often a child, or the flag, is looked at.
const POLL: Duration = Duration::from_millis(50);
/// How long a server may take to load its model.
const READY: Duration = Duration::from_secs(60);

/// Where its programs and models are.
pub struct Llama {
    dir: PathBuf,
    threads: usize,
    stop: Stop,
}

/// A child process that ends with its handle.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        // A Ctrl-C in the terminal is for us to act on.
        command.process_group(0);
        let child = die_with_parent(command).spawn();
        child.map(Self).with_context(|| format!("cannot start {name}"))
    }

    /// Its standard input and output, where they are pipes.
    pub fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        Some((self.0.stdin.take()?, self.0.stdout.take()?))
    }

    fn wait(&mut self, stop: &Stop) -> anyhow::Result<ExitStatus> {
        loop {
            stop.check()?;
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(POLL);
        }
    }
}

fn with_numbers(command: &mut Command, numbers: &[(&str, usize)]) {
    for (flag, number) in numbers {
        command.arg(flag).arg(number.to_string());
    }
}

impl Llama {
    pub fn find(dir: PathBuf, threads: usize, stop: Stop) -> anyhow::Result<Self> {
        let found = Self { dir, threads, stop };
        for file in [found.program("llama-bench"), found.model("BF16")] {
            ensure!(
                file.exists(),
                "{} is missing: run benches/peers/install.sh {}",
                file.display(),
                found.dir.display()
            );
        }
        Ok(found)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn program(&self, name: &str) -> PathBuf {
        self.dir.join("llama/bin").join(name)
    }

    fn model(&self, kind: &str) -> PathBuf {
        self.dir.join("models").join(format!("{kind}.gguf"))
    }

    /// Tokens a second of `[prompt, generated, depth]`, each measured `samples` times.
    pub fn bench(
        &self,
        kind: &str,
        [prompt, generated, depth]: [usize; 3],
        samples: usize,
    ) -> anyhow::Result<Vec<f64>> {
        let mut command = Command::new(self.program("llama-bench"));
        command.arg("-m").arg(self.model(kind)).args(["-o", "json", "-fa", "1"]);
        let numbers = [
            ("-t", self.threads),
            ("-p", prompt),
            ("-n", generated),
            ("-d", depth),
            ("-r", samples),
        ];
        with_numbers(&mut command, &numbers);
        bench_samples(&output(&mut command, &self.stop)?)
    }

    /// Tokens a second of `count` sequences decoded together after one prompt of `context` tokens
    /// that all have in common: each with rows of its own, or all with the same ones.
    pub fn batched(
        &self,
        kind: &str,
        [count, context, generated]: [usize; 3],
        unified: bool,
    ) -> anyhow::Result<f64> {
        // Of each sequence in whole blocks of 256, one dummy token included.
        let room = count * (context + generated + 1).next_multiple_of(256);
        let mut command = Command::new(self.program("llama-batched-bench"));
        command.arg("-m").arg(self.model(kind)).args(["-fa", "on", "-pps"]);
        command.args(["--output-format", "jsonl"]);
        command.arg(if unified { "-kvu" } else { "-no-kvu" });
        let numbers = [
            ("-t", self.threads),
            ("-c", room),
            ("-npp", context),
            ("-ntg", generated),
            ("-npl", count),
        ];
        with_numbers(&mut command, &numbers);
        batched_rate(&output(&mut command, &self.stop)?)
    }

    /// A server with one slot of `context` tokens that keeps saved slots in `dir`.
    pub fn serve(&self, kind: &str, context: usize, dir: &Path) -> anyhow::Result<Server> {
        // Free now; a moment later somebody else may have it, and the server then says so.
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let log = std::fs::File::create(dir.join("llama-server.log"))?;
        let mut command = Command::new(self.program("llama-server"));
        command.arg("-m").arg(self.model(kind)).arg("--slot-save-path").arg(dir);
        command.args(["-np", "1", "-fa", "on", "--host", "127.0.0.1", "--cache-ram", "0"]);
        command.arg("--no-webui");
        let numbers = [
            ("-t", self.threads),
            ("-tb", self.threads),
            ("-c", context),
            ("--port", usize::from(port)),
        ];
        with_numbers(&mut command, &numbers);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let running = Running::start(&mut command)?;
        let mut server = Server { running, port, stop: self.stop.clone() };
        server.ready().with_context(|| {
            let log = std::fs::read_to_string(dir.join("llama-server.log")).unwrap_or_default();
            last_lines(&log)
        })?;
        Ok(server)
    }
}

/// Runs a program to its end; its standard output.
pub fn output(command: &mut Command, stop: &Stop) -> anyhow::Result<String> {
    let (mut out, mut log) = (tempfile::tempfile()?, tempfile::tempfile()?);
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(log.try_clone()?);
    let status = Running::start(command)?.wait(stop)?;
    let read = |file: &mut std::fs::File| -> anyhow::Result<String> {
        use std::io::Seek;
        file.rewind()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    if !status.success() {
        let name = command.get_program().to_string_lossy().into_owned();
        bail!("{name} ended with {status}: {}", last_lines(&read(&mut log)?));
    }
    read(&mut out)
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("; ")
}

/// The samples of the one test in `llama-bench -o json`.
fn bench_samples(text: &str) -> anyhow::Result<Vec<f64>> {
    let report: Value = serde_json::from_str(text).context("llama-bench's report")?;
    let samples = report[0]["samples_ts"].as_array().context("llama-bench has no samples_ts")?;
    let samples: Vec<f64> = samples.iter().filter_map(Value::as_f64).collect();
    ensure!(!samples.is_empty(), "llama-bench measured nothing");
    Ok(samples)
}

/// Decoded tokens a second in the last line of `llama-batched-bench --output-format jsonl`.
fn batched_rate(text: &str) -> anyhow::Result<f64> {
    let line = text.lines().rev().find(|l| l.trim_start().starts_with('{'));
    let report: Value = serde_json::from_str(line.context("llama-batched-bench printed nothing")?)?;
    report["speed_tg"].as_f64().context("llama-batched-bench's report has no speed_tg")
}

/// A running llama-server.
pub struct Server {
    running: Running,
    port: u16,
    stop: Stop,
}

impl Server {
    fn ready(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        while started.elapsed() < READY {
            self.stop.check()?;
            if let Some(status) = self.running.0.try_wait()? {
                bail!("llama-server ended with {status}");
            }
            if self.request("GET", "/health", "").is_ok_and(|(code, _)| code == 200) {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        bail!("llama-server is not ready after {} s", READY.as_secs())
    }

    pub fn pid(&self) -> u32 {
        self.running.0.id()
    }

    /// Processes a prompt, and generates so many tokens.
    pub fn complete(
        &self,
        prompt: &[u32],
        generate: usize,
        reuse: bool,
    ) -> anyhow::Result<Completion> {
        let answer = self.post(
            "/completion",
            &json!({
                "prompt": prompt, "n_predict": generate, "cache_prompt": reuse, "id_slot": 0,
                "temperature": 0.0,
            }),
        )?;
        let timings = &answer["timings"];
        let processed = timings["prompt_n"].as_u64().context("no timings.prompt_n")? as usize;
        Ok(Completion { processed })
    }

    /// Saves, restores or erases the slot.
    pub fn slot(&self, action: &str, file: &str) -> anyhow::Result<Value> {
        self.post(&format!("/slots/0?action={action}"), &json!({"filename": file}))
    }

    fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let (code, answer) = self.request("POST", path, &body.to_string())?;
        ensure!(code == 200, "llama-server answers {code} to {path}: {answer}");
        serde_json::from_str(&answer).with_context(|| format!("llama-server's answer to {path}"))
    }

    /// One HTTP exchange on a connection of its own.
    fn request(&self, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(POLL))?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let mut bytes = Vec::new();
        let mut part = [0u8; 65536];
        loop {
            match stream.read(&mut part) {
                Ok(0) => break,
                Ok(n) => bytes.extend_from_slice(&part[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    self.stop.check()?;
                }
                Err(e) => return Err(e.into()),
            }
            if whole(&bytes) {
                break;
            }
        }
        response(&bytes)
    }
}

/// What a completion did.
pub struct Completion {
    /// Tokens of the prompt that were computed.
    pub processed: usize,
}

/// Head and body of a response.
fn parts(bytes: &[u8]) -> Option<(String, &[u8])> {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n")?;
    Some((String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 4..]))
}

fn content_length(head: &str) -> Option<usize> {
    let line = head.lines().find(|l| l.to_ascii_lowercase().starts_with("content-length:"))?;
    line.split_once(':')?.1.trim().parse().ok()
}

/// Whether every byte of the body that was announced is there.
fn whole(bytes: &[u8]) -> bool {
    parts(bytes).is_some_and(|(head, body)| content_length(&head).is_some_and(|n| body.len() >= n))
}

fn response(bytes: &[u8]) -> anyhow::Result<(u16, String)> {
    let (head, body) = parts(bytes).context("llama-server hung up")?;
    let code = head.split_whitespace().nth(1).and_then(|c| c.parse().ok());
    let body = String::from_utf8_lossy(body).into_owned();
    Ok((code.context("llama-server's answer has no status")?, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read() {
        let report = r#"[{"n_prompt": 0, "n_gen": 32, "avg_ts": 2.0, "samples_ts": [1.5, 2.5]}]"#;
        assert_eq!(bench_samples(report).unwrap(), [1.5, 2.5]);
        assert!(bench_samples("[]").is_err());
        assert!(bench_samples("no model").is_err());
        let lines = "\n{\"pp\": 1, \"speed_tg\": 3.0}\n{\"pp\": 2, \"speed_tg\": 40.25}\n\n";
        assert_eq!(batched_rate(lines).unwrap(), 40.25);
        assert!(batched_rate("").is_err());
    }

    #[test]
    fn responses_are_read_to_their_end() {
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc";
        assert!(!whole(&answer[..answer.len() - 1]));
        assert!(whole(answer));
        assert_eq!(response(answer).unwrap(), (200, "abc".into()));
        assert!(response(b"HTTP/1.1 200").is_err());
    }

    #[test]
    fn a_stopped_run_ends_its_child() {
        let stop = Stop::default();
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut child = Running::start(&mut command).unwrap();
        let pid = child.0.id();
        assert!(Path::new("/proc").join(pid.to_string()).exists());
        assert!(child.0.try_wait().unwrap().is_none());
        drop(child);
        assert!(!Path::new("/proc").join(pid.to_string()).exists());
        assert_eq!(output(Command::new("echo").arg("x"), &stop).unwrap(), "x\n");
        assert!(output(&mut Command::new("false"), &stop).is_err());
    }
}
