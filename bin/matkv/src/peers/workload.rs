//! What is asked of both sides: chunks of exactly so many tokens, and the ids of whole prompts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use matkv_loader_core::measure::speed::Speed;

use super::own;
use crate::sources::collect;

/// A document that is one whole chunk.
pub struct Piece {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// The first `count` pieces of `size` tokens of the corpus.
pub fn pieces(
    speed: &Speed,
    corpus: &[String],
    size: usize,
    count: usize,
) -> anyhow::Result<Vec<Piece>> {
    let (sources, skipped) = collect(corpus)?;
    ensure!(skipped.is_empty(), "{}: {}", skipped[0].name, skipped[0].reason);
    let mut out = Vec::new();
    for source in sources {
        let text = source.read().map_err(|e| anyhow::anyhow!("{}: {e}", source.name("stdin")))?;
        let found = own(speed.pieces(&text, size))?;
        out.extend(found.into_iter().map(|(text, tokens)| Piece { text, tokens }));
        if out.len() >= count {
            out.truncate(count);
            return Ok(out);
        }
    }
    anyhow::bail!(
        "the corpus has {} pieces of {size} tokens, {count} are needed: name more documents",
        out.len()
    )
}

/// Pieces as files, and which tokens each has.
pub struct Corpus {
    dir: tempfile::TempDir,
    pieces: Vec<Piece>,
    next: usize,
    tokens: HashMap<String, usize>,
}

impl Corpus {
    pub fn new(pieces: Vec<Piece>) -> anyhow::Result<Self> {
        Ok(Self { dir: tempfile::tempdir()?, pieces, next: 0, tokens: HashMap::new() })
    }

    /// Writes the next `count` pieces; their paths, to be ingested.
    pub fn next(&mut self, count: usize) -> anyhow::Result<Vec<String>> {
        ensure!(self.next + count <= self.pieces.len(), "no pieces are left");
        let mut paths = Vec::new();
        for i in self.next..self.next + count {
            let path = self.dir.path().join(format!("piece-{i}.txt"));
            std::fs::write(&path, &self.pieces[i].text)
                .with_context(|| format!("cannot write {}", path.display()))?;
            let name = path.display().to_string();
            self.tokens.insert(name.clone(), i);
            paths.push(name);
        }
        self.next += count;
        Ok(paths)
    }

    /// Token ids of the only chunk of a document.
    pub fn tokens(&self, document: &str) -> anyhow::Result<&[u32]> {
        let i = self.tokens.get(document);
        let i = *i.with_context(|| format!("{document} was not ingested by this run"))?;
        Ok(&self.pieces[i].tokens)
    }
}

/// Where a chunk's file is.
pub fn file_of(store: &Path, fingerprint: &str, id: &str) -> PathBuf {
    let root = store.join(&fingerprint[..16]).join("chunks");
    root.join(&id[..2]).join(format!("{id}.kv"))
}

/// Megabytes (10⁶) of a process's proportional share of memory outside mappings that `skip` names.
pub fn pss_mb(pid: u32, skip: impl Fn(&str) -> bool) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(pss_kb(&text, skip) as f64 * 1024.0 / 1e6)
}

fn pss_kb(smaps: &str, skip: impl Fn(&str) -> bool) -> u64 {
    let (mut total, mut counted) = (0, true);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some(key) = first.strip_suffix(':') {
            if key == "Pss" && counted {
                total += words.next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
            }
        } else {
            // A mapping: range, permissions, offset, device, inode, name.
            let name: Vec<&str> = words.skip(4).collect();
            counted = !skip(&name.join(" "));
        }
    }
    total
}

/// Ticks of processor time a process has had.
pub fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    ticks_of(&stat)
}

fn ticks_of(stat: &str) -> u64 {
    // After the name, which may hold anything: state is the third field, user and system time are
    // the fourteenth and fifteenth.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaps_are_summed_without_what_is_skipped() {
        let smaps = "\
7f00-7f01 rw-s 00000000 00:1a 7   /dev/shm/matkv-1
Rss:       100 kB
Pss:        50 kB
Pss_Dirty:  50 kB
7f01-7f02 rw-p 00000000 00:00 0
Pss:         7 kB
5500-5501 r-xp 00000000 fe:00 9   /usr/bin/a b
Pss:         5 kB
";
        assert_eq!(pss_kb(smaps, |_| false), 62);
        assert_eq!(pss_kb(smaps, |name| name.starts_with("/dev/shm/")), 12);
        assert_eq!(pss_kb(smaps, |name| name == "/usr/bin/a b"), 57);
    }

    #[test]
    fn ticks_are_read_after_the_name() {
        let stat = "12 (a) b) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20";
        assert_eq!(ticks_of(stat), 42);
        assert_eq!(ticks_of(""), 0);
    }
}
