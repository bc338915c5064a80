//! Chunk files that were changed: one is used only if every byte of it is covered by a checksum
//! that is right and says what was expected, and no bytes at all make the reader panic.
#![no_main]

use std::ops::Range;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use matkv_format::{ChunkFile, Expectation, Superblock};
use matkv_types::{
    ChunkId, ContentId, Digest, Encoding, Fingerprint, KvDtype, KvShape, PAGE_BYTES, TILE_ROWS,
};

/// Byte offsets of `docs/chunk-file.md`.
const FIELDS: Range<usize> = 80..144;
const ROW_TYPE: usize = 84;
const SHAPE_AND_ROWS: usize = 92;
const SIZES: usize = 120;
const TOKEN_CHECKSUM: usize = 112;
const EXTENT_CHECKSUMS: usize = 192;
const OWN_CHECKSUM: usize = PAGE_BYTES - 4;
/// More than two tiles, so that a file has whole ones and a padded one.
const ROWS_MAX: usize = 2 * TILE_ROWS + 3;

#[derive(Arbitrary, Debug)]
struct Input {
    file: File,
    change: Change,
}

#[derive(Arbitrary, Debug)]
struct File {
    layers: u8,
    kv_heads: u8,
    head_dim: u8,
    first_token: u32,
    tokens: Vec<u32>,
    base_position: u32,
    fingerprint: [u8; 32],
    scope: u8,
    /// What the slot held before.
    garbage: u8,
    beyond: u8,
}

#[derive(Arbitrary, Debug)]
enum Change {
    /// What flash, a crash or a cosmic ray may do.
    Accident(Vec<Edit>),
    /// By someone who makes the checksums right afterwards.
    Forgery {
        edits: Vec<Edit>,
        fields: Vec<(u8, u32)>,
        /// The sizes are made to follow from the shape, too.
        sizes: bool,
    },
    /// The same file, and another one asked for.
    Asked(Asked),
    /// No file of ours.
    Other { bytes: Vec<u8>, magic: bool, sealed: bool },
}

#[derive(Arbitrary, Debug)]
enum Edit {
    Flip {
        at: u32,
        mask: u8,
    },
    /// The superblock is a small part of the file, and most of it is zero.
    Field {
        at: u8,
        value: u8,
    },
    Fill {
        at: u32,
        len: u16,
        value: u8,
    },
    Move {
        from: u32,
        to: u32,
        len: u16,
    },
    Cut(u32),
    Extend(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Asked {
    Fingerprint([u8; 32]),
    ChunkId([u8; 32]),
    Token { at: u8, value: u32 },
    Rows(u8),
    Layers(u16),
    KvHeads(u16),
    BasePosition(usize),
}

struct Sample {
    tokens: Vec<u32>,
    expect: Expectation<'static>,
    superblock: Superblock,
    bytes: Vec<u8>,
}

fn sample(file: &File) -> Sample {
    let shape = KvShape {
        layers: usize::from(file.layers % 3) + 1,
        kv_heads: usize::from(file.kv_heads % 2) + 1,
        head_dim: 32 * (usize::from(file.head_dim % 2) + 1),
    };
    let mut tokens = vec![file.first_token];
    tokens.extend(file.tokens.iter().take(ROWS_MAX - 1));
    let fingerprint = Fingerprint(Digest(file.fingerprint));
    let scope = file.scope.to_string();
    let expect = Expectation {
        fingerprint,
        chunk_id: ChunkId::new(fingerprint, &scope, ContentId::of_tokens(&tokens)),
        tokens: &[],
        shape,
        base_position: file.base_position as usize,
    };
    let len = ChunkFile::len(shape, KvDtype::Bf16, tokens.len());
    let kv = ChunkFile::kv_range(shape, KvDtype::Bf16, tokens.len());
    let mut bytes = vec![file.garbage; len + usize::from(file.beyond)];
    let rows = bytes[kv].iter_mut().enumerate();
    rows.for_each(|(i, byte)| *byte = (i * 131 % 251) as u8 ^ file.garbage);
    let asked = Expectation { tokens: &tokens, ..expect.clone() };
    let superblock = ChunkFile::seal(&mut bytes, &asked).expect("the slot is large enough");
    let beyond = bytes.split_off(len);
    assert!(beyond.iter().all(|&byte| byte == file.garbage), "sealed beyond the file");
    assert_eq!(ChunkFile::verify(&bytes, &asked).as_ref(), Ok(&superblock));
    assert_eq!(superblock.file_len(), len);
    Sample { tokens, expect, superblock, bytes }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

impl Sample {
    fn expect(&self) -> Expectation<'_> {
        Expectation { tokens: &self.tokens, ..self.expect.clone() }
    }

    /// Places of the checksums, and what each covers.
    fn checksums(&self) -> Vec<(usize, Range<usize>)> {
        let (kv, stride) =
            (Superblock::kv_offset(self.tokens.len()), self.superblock.layout().layer_stride());
        let mut all = vec![(TOKEN_CHECKSUM, PAGE_BYTES..kv)];
        all.extend((0..self.expect.shape.layers).map(|layer| {
            let start = kv + layer * stride;
            (EXTENT_CHECKSUMS + 4 * layer, start..start + stride)
        }));
        // Last, because it covers the others.
        all.push((OWN_CHECKSUM, 0..OWN_CHECKSUM));
        all
    }

    fn reseal(&self, bytes: &mut [u8]) {
        for (at, covered) in self.checksums() {
            if covered.end <= bytes.len() && at + 4 <= bytes.len() {
                let sum = crc32c::crc32c(&bytes[covered]);
                bytes[at..at + 4].copy_from_slice(&sum.to_le_bytes());
            }
        }
    }

    /// Whether these bytes are a file that says the same, written by someone else: a checksum
    /// keeps accidents out, not forgers.
    fn says_the_same(&self, bytes: &[u8]) -> bool {
        let tokens = PAGE_BYTES..PAGE_BYTES + 4 * self.tokens.len();
        let sums = self.checksums();
        let is_sum = |i: usize| sums.iter().any(|&(at, _)| (at..at + 4).contains(&i));
        // A row type of the same size is another encoding of the chunk, which nobody excludes.
        let row_type = ROW_TYPE..ROW_TYPE + 4;
        let wide = |i: usize| {
            let types = [KvDtype::Bf16, KvDtype::Fp16].map(KvDtype::code);
            row_type.contains(&i) && types.contains(&word(bytes, ROW_TYPE))
        };
        bytes.len() >= self.bytes.len()
            && (0..PAGE_BYTES).all(|i| is_sum(i) || wide(i) || bytes[i] == self.bytes[i])
            && bytes[tokens.clone()] == self.bytes[tokens]
            && sums
                .iter()
                .all(|(at, covered)| word(bytes, *at) == crc32c::crc32c(&bytes[covered.clone()]))
    }

    fn check(&self, bytes: &[u8]) {
        decode(bytes);
        let len = self.bytes.len();
        let whole = bytes.len() >= len;
        let same = whole && bytes[..len] == self.bytes[..];
        let sums_are_ours = whole
            && self.checksums().iter().all(|&(at, _)| bytes[at..at + 4] == self.bytes[at..at + 4]);
        let found = ChunkFile::verify(bytes, &self.expect());
        match &found {
            Ok(superblock) if same => assert_eq!(*superblock, self.superblock),
            Ok(superblock) if superblock.encoding != self.superblock.encoding => {}
            Ok(_) => assert!(!sums_are_ours, "a byte differs and no checksum does"),
            Err(e) => assert!(!same, "{e}"),
        }
        assert_eq!(found.is_ok(), self.says_the_same(bytes), "{found:?}");
    }

    fn edit(&self, bytes: &mut Vec<u8>, edits: &[Edit]) {
        for edit in edits {
            let within = |at: u32, len: usize| if len == 0 { 0 } else { at as usize % len };
            let end = |at: usize, len: u16| (at + usize::from(len)).min(bytes.len());
            match *edit {
                Edit::Flip { at, mask } => {
                    let at = within(at, bytes.len());
                    bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= mask);
                }
                Edit::Field { at, value } => {
                    bytes.iter_mut().skip(usize::from(at)).take(1).for_each(|byte| *byte = value);
                }
                Edit::Fill { at, len, value } => {
                    let at = within(at, bytes.len());
                    let end = end(at, len);
                    bytes[at..end].fill(value);
                }
                Edit::Move { from, to, len } => {
                    let (from, to) = (within(from, bytes.len()), within(to, bytes.len()));
                    let end = end(from.max(to), len) - from.max(to) + from;
                    bytes.copy_within(from..end, to);
                }
                Edit::Cut(len) => bytes.truncate(within(len, bytes.len())),
                Edit::Extend(ref more) => bytes.extend(more),
            }
        }
    }

    fn another_asked(&self, asked: &Asked) {
        let mut expect = self.expect();
        let mut tokens = self.tokens.clone();
        match *asked {
            Asked::Fingerprint(bytes) => expect.fingerprint = Fingerprint(Digest(bytes)),
            Asked::ChunkId(bytes) => expect.chunk_id = ChunkId(Digest(bytes)),
            Asked::Token { at, value } => {
                let at = usize::from(at) % tokens.len();
                tokens[at] = value;
            }
            Asked::Rows(rows) => tokens.resize(usize::from(rows), 0),
            Asked::Layers(layers) => expect.shape.layers = usize::from(layers),
            Asked::KvHeads(heads) => expect.shape.kv_heads = usize::from(heads),
            Asked::BasePosition(position) => expect.base_position = position,
        }
        let ours = self.expect();
        let same = expect.fingerprint == ours.fingerprint
            && expect.chunk_id == ours.chunk_id
            && tokens == self.tokens
            && expect.shape == ours.shape
            && expect.base_position == ours.base_position;
        let expect = Expectation { tokens: &tokens, ..expect };
        assert_eq!(ChunkFile::verify(&self.bytes, &expect).is_ok(), same, "{asked:?}");
    }
}

/// Writes as much as there is room for.
fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes.iter_mut().skip(at).zip(what).for_each(|(byte, &value)| *byte = value);
}

/// Offset of the KV section, layer stride and file length of bf16 rows, in numbers too wide to
/// overflow for any number of layers a superblock has room for.
fn sizes_of([layers, kv_heads, head_dim, rows]: [u128; 4]) -> [u128; 3] {
    let up = |n: u128, to: usize| n.div_ceil(to as u128) * to as u128;
    let kv = PAGE_BYTES as u128 + up(rows * 4, PAGE_BYTES);
    let stride = up(kv_heads * 2 * up(rows, TILE_ROWS) * head_dim * 2, PAGE_BYTES);
    [kv, stride, layers.saturating_mul(stride).saturating_add(kv)]
}

/// A superblock alone: whatever it says, its sizes are the ones that follow from its own fields.
fn decode(bytes: &[u8]) {
    let Ok(found) = Superblock::decode(bytes) else { return };
    assert_eq!(found.extent_checksums.len(), found.shape.layers);
    if found.encoding == Encoding::EXACT {
        let KvShape { layers, kv_heads, head_dim } = found.shape;
        let fields = [layers, kv_heads, head_dim, found.rows].map(|n| n as u128);
        let sizes =
            [Superblock::kv_offset(found.rows), found.layout().layer_stride(), found.file_len()];
        assert_eq!(sizes.map(|n| n as u128), sizes_of(fields), "{:?}", found.shape);
    }
}

fuzz_target!(|input: Input| {
    let sample = sample(&input.file);
    let mut bytes = sample.bytes.clone();
    match input.change {
        Change::Accident(edits) => {
            sample.edit(&mut bytes, &edits);
            sample.check(&bytes);
        }
        Change::Forgery { edits, fields, sizes } => {
            sample.edit(&mut bytes, &edits);
            for (at, value) in fields {
                put(
                    &mut bytes,
                    FIELDS.start + usize::from(at) * 4 % FIELDS.len(),
                    &value.to_le_bytes(),
                );
            }
            if sizes && bytes.len() >= PAGE_BYTES {
                let fields: [u32; 4] =
                    std::array::from_fn(|i| word(&bytes, SHAPE_AND_ROWS + 4 * i));
                let all = sizes_of(fields.map(u128::from));
                all.iter().enumerate().for_each(|(i, &size)| {
                    put(&mut bytes, SIZES + 8 * i, &(size as u64).to_le_bytes());
                });
            }
            sample.reseal(&mut bytes);
            sample.check(&bytes);
        }
        Change::Asked(asked) => sample.another_asked(&asked),
        Change::Other { mut bytes, magic, sealed } => {
            if magic {
                bytes.splice(..bytes.len().min(16), sample.bytes[..16].iter().copied());
            }
            if sealed {
                bytes.resize(bytes.len().max(PAGE_BYTES), 0);
                sample.reseal(&mut bytes);
            }
            sample.check(&bytes);
        }
    }
});
