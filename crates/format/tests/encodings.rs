//! Every row type with every codec: what comes back, how exact, and what damage does.

use matkv_format::{ChunkFile, Expectation, FormatError, Superblock};
use matkv_types::{
    ChunkId, Codec, ContentId, Digest, Encoding, Fingerprint, GROUP_ROWS, KvDtype, KvLayout,
    KvShape, PAGE_BYTES, bf16_to_f32, f32_to_bf16,
};
use proptest::prelude::*;

const SHAPE: KvShape = KvShape { layers: 3, kv_heads: 2, head_dim: 64 };

fn expect(tokens: &[u32]) -> Expectation<'_> {
    let fingerprint = Fingerprint(Digest([9; 32]));
    let chunk_id = ChunkId::new(fingerprint, "default", ContentId::of_tokens(tokens));
    Expectation { fingerprint, chunk_id, tokens, shape: SHAPE, base_position: 31 }
}

/// Numbers as K and V have them: channels of very different size, and an offset in some.
fn value(seed: u64, layer: usize, head: usize, v: bool, row: usize, d: usize) -> f32 {
    let mut x = seed ^ ((layer * 31 + head) * 2 + usize::from(v)) as u64;
    for n in [row as u64, d as u64] {
        x = (x ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x ^= x >> 29;
    }
    let unit = (x >> 40) as f32 / (1 << 24) as f32 - 0.5;
    let (size, offset) = if v { (2.0, 0.0) } else { (0.5 + (d % 7) as f32 * 4.0, (d % 3) as f32) };
    unit * size + offset
}

struct Rows {
    tokens: Vec<u32>,
    /// The KV section in bf16, padding poisoned.
    section: Vec<u8>,
    layout: KvLayout,
}

fn rows(seed: u64, count: usize) -> Rows {
    let layout = KvLayout::new(SHAPE, KvDtype::Bf16, count);
    let mut section = vec![0xff; layout.total_bytes()];
    for (layer, head) in (0..3).flat_map(|l| (0..2).map(move |h| (l, h))) {
        for (row, d) in (0..count).flat_map(|r| (0..64).map(move |d| (r, d))) {
            let k = layout.k_offset(layer, head) + 2 * KvLayout::k_index(64, row, d);
            let v = layout.v_offset(layer, head) + 2 * KvLayout::v_index(64, row, d);
            for (at, is_v) in [(k, false), (v, true)] {
                let x = f32_to_bf16(value(seed, layer, head, is_v, row, d));
                section[at..at + 2].copy_from_slice(&x.to_le_bytes());
            }
        }
    }
    let tokens = (0..count as u32).map(|t| t * 77 + 5).collect();
    Rows { tokens, section, layout }
}

fn encode(rows: &Rows, dtype: KvDtype) -> (Vec<u8>, Superblock) {
    let mut out = vec![0xee; ChunkFile::len(SHAPE, dtype, rows.tokens.len())];
    let mut section = rows.section.clone();
    let found = ChunkFile::encode(&mut section, &mut out, &expect(&rows.tokens), dtype).unwrap();
    (out, found)
}

/// The arena form of a file.
fn restore(file: &[u8], found: &Superblock) -> (Vec<u8>, KvLayout) {
    let layout = KvLayout::new(SHAPE, found.encoding.dtype.in_arena(), found.rows);
    let mut section = vec![0xee; layout.total_bytes()];
    for (i, layer) in section.chunks_exact_mut(layout.layer_stride()).enumerate() {
        ChunkFile::restore_layer(file, found, i, layer).unwrap();
    }
    (section, layout)
}

fn element(
    section: &[u8],
    layout: &KvLayout,
    (layer, head): (usize, usize),
    v: bool,
    row: usize,
    d: usize,
) -> f32 {
    let number = |at: usize| bf16_to_f32(u16::from_le_bytes([section[at], section[at + 1]]));
    let index = if v { KvLayout::v_index(64, row, d) } else { KvLayout::k_index(64, row, d) };
    let block = if v { layout.v_offset(layer, head) } else { layout.k_offset(layer, head) };
    if layout.dtype == KvDtype::Bf16 {
        return number(block + 2 * index);
    }
    let scale = if v {
        number(layout.v_scale_offset(layer, head) + 2 * row)
    } else {
        number(layout.k_scale_offset(layer, head) + 2 * (row / GROUP_ROWS * 64 + d))
    };
    f32::from(section[block + index] as i8) * scale
}

/// How far a restored element may be from the bf16 one, as a share of what bounds it.
///
/// int8: half a step of 1/127 of the largest magnitude in the group, the scale rounded up by at
/// most 2⁻⁷. int4: half a step of 1/15 of the range of the group, to which rounding the minimum
/// down adds 2⁻⁷ of its magnitude. fp8: 2⁻⁴ of the number itself, or half the smallest step,
/// 2⁻¹⁰/448 of the largest. int4 and fp8 are widened to bf16: another 2⁻⁹.
fn tolerance(dtype: KvDtype, x: f32, low: f32, high: f32) -> f32 {
    let top = high.max(-low);
    match dtype {
        KvDtype::Bf16 | KvDtype::Fp16 => 0.0,
        KvDtype::Int8 => top / 127.0 / 2.0 * 1.01,
        KvDtype::Int4 => ((high - low) + top / 128.0) / 15.0 / 2.0 * 1.02 + top / 256.0,
        KvDtype::Fp8 => (x.abs() / 16.0).max(top / 448.0 / 1024.0) + x.abs() / 256.0,
        KvDtype::F32 => unreachable!(),
    }
}

/// Smallest and largest of the numbers that share a scale with `(row, d)`.
fn bounds(
    rows: &Rows,
    at: (usize, usize),
    v: bool,
    row: usize,
    d: usize,
    dtype: KvDtype,
) -> (f32, f32) {
    let count = rows.tokens.len();
    let (rs, ds) = match (dtype, v) {
        (KvDtype::Fp8, _) => (0..count, 0..64),
        (_, true) => (row..row + 1, 0..64),
        (_, false) => {
            let g = row / GROUP_ROWS * GROUP_ROWS;
            (g..(g + GROUP_ROWS).min(count), d..d + 1)
        }
    };
    let mut out = (f32::INFINITY, f32::NEG_INFINITY);
    for r in rs {
        for d in ds.clone() {
            let x = element(&rows.section, &rows.layout, at, v, r, d);
            out = (out.0.min(x), out.1.max(x));
        }
    }
    out
}

#[test]
fn every_encoding_restores_what_it_promises() {
    for count in [1, 17, 64, 130] {
        let rows = rows(7, count);
        for dtype in KvDtype::AT_REST {
            let (image, found) = encode(&rows, dtype);
            let (plain, layout) = restore(&image, &found);
            for (row, d) in [(0, 0), (count - 1, 63), (count / 2, 31), (count / 3, 5)] {
                for (layer, head, v) in [(0, 0, false), (2, 1, true), (1, 0, true), (2, 1, false)] {
                    let want = element(&rows.section, &rows.layout, (layer, head), v, row, d);
                    let got = element(&plain, &layout, (layer, head), v, row, d);
                    let (low, high) = bounds(&rows, (layer, head), v, row, d, dtype);
                    let most = tolerance(dtype, want, low, high);
                    assert!((got - want).abs() <= most, "{dtype} {row},{d}: {got}, not {want}");
                }
            }
            for codec in Codec::ALL {
                let file = ChunkFile::compress(&image, &found, codec, 1).unwrap();
                let again = ChunkFile::verify(&file, &expect(&rows.tokens)).unwrap();
                assert_eq!(again.encoding, Encoding::new(dtype, codec));
                assert_eq!((file.len(), file.len() % PAGE_BYTES), (again.file_len(), 0));
                assert!(restore(&file, &again).0 == plain, "{dtype}+{codec} changes the rows");
            }
        }
    }
}

/// Files of every row type as the first build that knew it wrote them.
#[test]
fn golden_files_of_every_row_type() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1");
    let rows = rows(11, 20);
    for dtype in KvDtype::AT_REST {
        let (image, _) = encode(&rows, dtype);
        let path = format!("{dir}/{dtype}.kv");
        if std::env::var_os("MATKV_WRITE_GOLDEN").is_some() {
            std::fs::write(&path, &image).unwrap();
        }
        let golden = std::fs::read(&path).unwrap();
        assert!(golden == image, "this build writes {dtype} otherwise");
        assert!(ChunkFile::verify(&golden, &expect(&rows.tokens)).is_ok());
    }
}

#[test]
fn transcoding_is_encoding_anew() {
    let rows = rows(3, 100);
    let (bf16, found) = encode(&rows, KvDtype::Bf16);
    for dtype in KvDtype::AT_REST {
        for codec in [Codec::None, Codec::SplitZstd] {
            let to = Encoding::new(dtype, codec);
            let got = ChunkFile::transcode(&bf16, &found, &expect(&rows.tokens), to, 3).unwrap();
            let (image, sealed) = encode(&rows, dtype);
            let want = ChunkFile::compress(&image, &sealed, codec, 3).unwrap();
            assert!(got == want, "{to}");
            let there = ChunkFile::verify(&got, &expect(&rows.tokens)).unwrap();
            let plain = Encoding::new(dtype, Codec::None);
            let back = ChunkFile::transcode(&got, &there, &expect(&rows.tokens), plain, 3).unwrap();
            assert!(back == image, "{to}: the lossless stage is undone");
        }
    }
}

#[test]
fn every_flipped_byte_of_a_compressed_file_is_seen() {
    let rows = rows(5, 20);
    let (image, found) = encode(&rows, KvDtype::Int8);
    let mut file = ChunkFile::compress(&image, &found, Codec::Zstd, 1).unwrap();
    for at in 0..file.len() {
        file[at] ^= 1 << (at % 8);
        assert!(ChunkFile::verify(&file, &expect(&rows.tokens)).is_err(), "byte {at}");
        file[at] ^= 1 << (at % 8);
    }
    assert!(ChunkFile::verify(&file, &expect(&rows.tokens)).is_ok());
}

/// Whoever forges checksums gets an error from the codec, never a panic or a wrong length.
#[test]
fn a_codec_that_meets_nonsense_says_so() {
    let rows = rows(5, 40);
    for codec in [Codec::Lz4, Codec::SplitLz4, Codec::Zstd, Codec::SplitZstd] {
        let (mut image, _) = encode(&rows, KvDtype::Bf16);
        let kv = ChunkFile::kv_range(SHAPE, KvDtype::Bf16, 40);
        image[kv].fill(7);
        let found = ChunkFile::seal(&mut image, &expect(&rows.tokens)).unwrap();
        let mut file = ChunkFile::compress(&image, &found, codec, 1).unwrap();
        let small = Superblock::decode(&file).unwrap();
        let extent = small.extents().next().unwrap();
        let mut seen = 0;
        for at in extent {
            for bit in 0..8 {
                file[at] ^= 1 << bit;
                let mut out = vec![0; found.layout().layer_stride()];
                match ChunkFile::restore_layer(&file, &small, 0, &mut out) {
                    Err(FormatError::Codec { .. }) => seen += 1,
                    Err(other) => panic!("{other}"),
                    Ok(()) => {}
                }
                file[at] ^= 1 << bit;
            }
        }
        assert!(seen > 0, "{codec}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Any rows, with the odd number that is huge, zero or not finite: nothing panics, and what
    /// is written verifies.
    #[test]
    fn any_rows(
        seed in any::<u64>(), count in 1usize..70, odd in any::<u16>(), at in any::<u32>(),
    ) {
        let mut rows = rows(seed, count);
        let place = at as usize % (rows.section.len() / 2) * 2;
        rows.section[place..place + 2].copy_from_slice(&odd.to_le_bytes());
        for dtype in KvDtype::AT_REST {
            let (image, found) = encode(&rows, dtype);
            prop_assert!(ChunkFile::verify(&image, &expect(&rows.tokens)).is_ok());
            restore(&image, &found);
        }
    }
}
