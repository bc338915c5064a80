//! How fast the model computes, with the code that serves and without the processes around it.

use std::path::Path;
use std::time::Instant;

use matkv_config::Config;
use matkv_format::{ChunkFile, Superblock};
use matkv_model::{
    Detokenizer, ForwardRow, LanguageModel, Phase, PromptTexts, Segment as KvRun, Source, Step,
    Team, model_path,
};
use matkv_store::{Identity, Store, StoreOptions, TierOptions};
use matkv_sys::{Segment, SlotRef};
use matkv_types::{ChunkId, ContentId, Encoding, KvDtype, KvLayout, PAGE_BYTES};

use super::load::add;
use super::machine;
use super::text;
use crate::chunk_spec::ChunkSpec;
use crate::compile::{encode, restore};

/// Rows of one call, as the loader computes them.
const ROWS_PER_CALL: usize = 256;
/// Level of the lossless stage, where there is one.
const LEVEL: i32 = 3;

/// The model as both processes have it.
pub struct Speed {
    prefill: LanguageModel,
    decode: LanguageModel,
    prefix: Vec<u32>,
    /// The prefix's rows, exact.
    before: Rows,
    encoding: Encoding,
    team: Team,
}

/// Rows in the arena's form.
#[derive(Clone)]
struct Rows {
    bytes: Vec<u8>,
    layout: KvLayout,
}

impl Rows {
    fn empty(layout: KvLayout) -> Self {
        Self { bytes: vec![0; layout.total_bytes()], layout }
    }
}

/// A sequence to decode: stored rows, and its own.
struct Sequence<'a> {
    stored: KvLayout,
    chunks: Vec<(&'a SlotRef, usize)>,
    own: Vec<u8>,
    layout: KvLayout,
    context: usize,
    decoded: usize,
}

/// Tokens without meaning: speed does not depend on them.
fn token(i: usize) -> u32 {
    (i * 7919 % 40_000) as u32
}

impl Speed {
    /// Opens the configured model for both phases.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(config: &Config, threads: usize) -> Result<Self, String> {
        let path = model_path(&config.cache_dir, &config.model).map_err(text)?;
        let open = |phase| {
            LanguageModel::open_for(&path, Some(&config.cache_dir), config.precision, phase)
        };
        let (prefill, decode) =
            (open(Phase::Prefill).map_err(text)?, open(Phase::Decode).map_err(text)?);
        let texts = PromptTexts {
            system: config.system.clone(),
            introduction: config.introduction.clone(),
        };
        let prefix = prefill.prefix(&texts).map_err(text)?;
        let encoding = Encoding::new(config.storage_dtype, config.storage_codec);
        let before = Rows::empty(KvLayout::new(prefill.kv_shape(), KvDtype::Bf16, prefix.len()));
        let team = machine::team(threads)?;
        let mut speed = Self { prefill, decode, prefix, before, encoding, team };
        let mut before = speed.before.clone();
        speed.rows(&speed.prefix, &mut before, None, false);
        speed.before = before;
        Ok(speed)
    }

    /// The model prefill is computed with.
    pub fn model(&self) -> &LanguageModel {
        &self.prefill
    }

    /// The threads it is computed by.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// Ids that precede the documents in every prompt.
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// The row type attention reads stored rows in.
    pub fn form(&self) -> KvDtype {
        self.encoding.in_arena().dtype
    }

    /// Pieces of a text that are exactly `size` tokens when they are tokenized on their own.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn pieces(&self, document: &str, size: usize) -> Result<Vec<(String, Vec<u32>)>, String> {
        let tokenizer = &self.prefill.tokenizer;
        let tokens = tokenizer.encode_inner(document).map_err(text)?;
        let mut out = Vec::new();
        for window in tokens.chunks_exact(size) {
            let piece = Detokenizer::text(tokenizer, window);
            let alone = tokenizer.encode_inner(&piece).map_err(text)?;
            if alone.len() == size {
                out.push((piece, alone));
            }
        }
        Ok(out)
    }

    /// Seconds of a full prefill of `count` tokens, with the logits of the last.
    pub fn prefill(&self, count: usize) -> f64 {
        let layout = KvLayout::new(self.prefill.kv_shape(), KvDtype::Bf16, count);
        let started = Instant::now();
        let tokens: Vec<u32> = (0..count).map(token).collect();
        self.rows(&tokens, &mut Rows::empty(layout), None, true);
        started.elapsed().as_secs_f64()
    }

    /// Computes rows of a prompt that begins with `before`.
    fn rows(&self, tokens: &[u32], rows: &mut Rows, before: Option<&Rows>, logits: bool) {
        let base = before.map_or(0, |b| b.layout.rows);
        let own_layout = rows.layout;
        for first in (0..tokens.len()).step_by(ROWS_PER_CALL) {
            let end = (first + ROWS_PER_CALL).min(tokens.len());
            let new: Vec<ForwardRow> = (first..end)
                .map(|i| ForwardRow { token: tokens[i], position: base + i, row: i })
                .collect();
            let segment =
                |source, rows, position| KvRun { source, first_row: 0, rows, position, shift: 0 };
            let before = before.map(|b| segment(Source::Slot(&b.bytes, b.layout), base, 0));
            let segments: Vec<KvRun<'_>> =
                before.into_iter().chain([segment(Source::Own, end, base)]).collect();
            let logits = logits && end == tokens.len();
            let (rows, segments, own) = (&new[..], &segments[..], &mut rows.bytes[..]);
            let step = Step { rows, segments, own, own_layout, logits };
            std::hint::black_box(self.team.install(|| self.prefill.forward(&mut [step])));
        }
    }

    /// Rows of a chunk as a load would leave them in the arena.
    fn chunk(&self, count: usize) -> Result<Rows, String> {
        let tokens: Vec<u32> = (0..count).map(token).collect();
        let file = self.file(&tokens)?;
        let found = Superblock::decode(&file).map_err(text)?;
        let layout = KvLayout::new(found.shape, self.form(), count);
        let mut rows = Rows::empty(layout);
        restore(&file, &found, &mut rows.bytes)?;
        Ok(rows)
    }

    /// A chunk's file, as an ingest makes it.
    fn file(&self, tokens: &[u32]) -> Result<Vec<u8>, String> {
        let shape = self.prefill.kv_shape();
        let layout = KvLayout::new(shape, KvDtype::Bf16, tokens.len());
        let mut rows = Rows::empty(layout);
        self.rows(tokens, &mut rows, Some(&self.before), false);
        let spec = self.spec();
        let expect = spec.expectation(self.id(tokens), tokens);
        let dtype = self.encoding.dtype;
        let mut file = vec![0; ChunkFile::len(shape, dtype, tokens.len())];
        let encoded = || encode(&mut rows.bytes, &mut file, &expect, dtype);
        let found = self.team.install(encoded).map_err(text)?;
        if self.encoding.codec == matkv_types::Codec::None {
            return Ok(file);
        }
        ChunkFile::compress(&file, &found, self.encoding.codec, LEVEL).map_err(text)
    }

    fn spec(&self) -> ChunkSpec {
        ChunkSpec {
            fingerprint: self.prefill.fingerprint(&self.prefix),
            shape: self.prefill.kv_shape(),
            encoding: self.encoding,
            level: LEVEL,
            base_position: self.prefix.len(),
        }
    }

    fn id(&self, tokens: &[u32]) -> ChunkId {
        ChunkId::new(self.spec().fingerprint, "bench", ContentId::of_tokens(tokens))
    }

    /// Seconds of computing, encoding, writing and committing chunks one after the other: what an
    /// ingest does except for vectors, and without computing one chunk while another is written.
    ///
    /// # Errors
    /// If the store in `dir` cannot be written.
    pub fn ingest(&self, dir: &Path, chunks: &[&[u32]]) -> Result<f64, String> {
        let spec = self.spec();
        let identity = Identity {
            fingerprint: spec.fingerprint,
            shape: spec.shape,
            base_position: spec.base_position,
            model: "bench".into(),
        };
        let flash = TierOptions { encoding: self.encoding, level: LEVEL, capacity: None };
        let options = StoreOptions { flash, ..StoreOptions::new(dir.to_owned()) };
        let store = Store::open(options, identity).map_err(text)?;
        let started = Instant::now();
        for tokens in chunks {
            let file = self.file(tokens)?;
            add(&store, self.id(tokens), tokens, &file)?;
        }
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Contexts to decode over, made once.
pub struct Decoding<'a> {
    speed: &'a Speed,
    layout: KvLayout,
    chunks: Vec<SlotRef>,
    /// What the chunks lie in, as in an arena.
    _segment: Segment,
}

impl<'a> Decoding<'a> {
    /// Stored chunks of `size` rows; the first is computed, the others hold the same rows in
    /// memory of their own.
    ///
    /// # Errors
    /// If a chunk cannot be encoded, or there is no memory.
    pub fn prepare(speed: &'a Speed, count: usize, size: usize) -> Result<Self, String> {
        let Rows { bytes, layout } = speed.chunk(size)?;
        let len = bytes.len().next_multiple_of(PAGE_BYTES);
        let name = format!("matkv-decoding-{}", std::process::id());
        let segment = Segment::create(&name, count * len).map_err(text)?;
        let chunk = |i: usize| {
            let mut slot = segment.region().exclusive(i * len..(i + 1) * len).map_err(text)?;
            slot[..bytes.len()].copy_from_slice(&bytes);
            Ok(slot.freeze())
        };
        let chunks = (0..count).map(chunk).collect::<Result<_, String>>()?;
        Ok(Self { speed, layout, chunks, _segment: segment })
    }

    fn sequence(&self, chunks: &[usize], rows: usize, room: usize) -> Sequence<'_> {
        let size = self.layout.rows;
        let take = |(n, i): (usize, &usize)| (&self.chunks[*i], size.min(rows - n * size));
        let layout = KvLayout::new(self.speed.decode.kv_shape(), KvDtype::Bf16, room + 1);
        Sequence {
            stored: self.layout,
            chunks: chunks.iter().enumerate().map(take).collect(),
            own: vec![0; layout.total_bytes()],
            layout,
            context: rows,
            decoded: 0,
        }
    }

    /// Seconds of each step of one sequence over `context` stored rows.
    pub fn one(&self, context: usize, steps: usize) -> Vec<f64> {
        let size = self.layout.rows;
        let chunks: Vec<usize> = (0..context.div_ceil(size)).collect();
        self.steps(vec![self.sequence(&chunks, context, steps)], steps)
    }

    /// Seconds of each step of `count` sequences over `context` rows, the first half of which all
    /// read from the same chunks.
    pub fn shared(&self, count: usize, context: usize, steps: usize) -> Vec<f64> {
        let each = context / self.layout.rows;
        let sequences = (0..count).map(|s| {
            let common = each / 2;
            let chunks: Vec<usize> = (0..each)
                .map(|i| if i < common { i } else { common + s * (each - common) + i - common })
                .collect();
            self.sequence(&chunks, context, steps)
        });
        self.steps(sequences.collect(), steps)
    }

    /// Chunks [`Self::shared`] needs.
    pub fn chunks_of_shared(count: usize, each: usize) -> usize {
        each / 2 + count * (each - each / 2)
    }

    /// Bytes a step of one sequence over `context` stored rows must read: weights and rows.
    pub fn bytes(&self, context: usize) -> f64 {
        let layout = self.layout;
        let rows = layout.shape.layers * layout.layer_bytes();
        self.speed.decode.weight_bytes() as f64 + rows as f64 / layout.rows as f64 * context as f64
    }

    fn steps(&self, mut sequences: Vec<Sequence<'_>>, steps: usize) -> Vec<f64> {
        let mut seconds = Vec::with_capacity(steps);
        // The first step touches memory for the first time.
        for i in 0..=steps {
            let started = Instant::now();
            self.step(&mut sequences);
            if i > 0 {
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        seconds
    }

    fn step(&self, sequences: &mut [Sequence<'_>]) {
        let rows: Vec<[ForwardRow; 1]> = sequences
            .iter()
            .map(|s| {
                let position = s.context + s.decoded;
                [ForwardRow { token: token(position), position, row: s.decoded }]
            })
            .collect();
        let segments: Vec<Vec<KvRun<'_>>> = sequences.iter().map(Sequence::segments).collect();
        let mut steps: Vec<Step<'_>> = sequences
            .iter_mut()
            .zip(rows.iter().zip(&segments))
            .map(|(s, (rows, segments))| Step {
                rows,
                segments,
                own: &mut s.own,
                own_layout: s.layout,
                logits: true,
            })
            .collect();
        let logits = self.speed.team.install(|| self.speed.decode.forward(&mut steps));
        std::hint::black_box(logits);
        drop(steps);
        drop(segments);
        sequences.iter_mut().for_each(|s| s.decoded += 1);
    }
}

impl<'a> Sequence<'a> {
    /// As a request has them: every chunk was computed at the same position.
    fn segments(&self) -> Vec<KvRun<'a>> {
        let mut position = 0;
        let mut out = Vec::new();
        for (chunk, rows) in &self.chunks {
            let source = Source::Slot(chunk, self.stored);
            let shift = position as i64;
            out.push(KvRun { source, first_row: 0, rows: *rows, position, shift });
            position += rows;
        }
        let rows = self.decoded + 1;
        out.push(KvRun { source: Source::Own, first_row: 0, rows, position, shift: 0 });
        out
    }
}
