//! A chunk file that arrives in pieces: each layer is verified, and decoded, as soon as it is
//! there.
//!
//! Pieces may come in any order; what is done with them is done in order. Whatever goes wrong, all
//! pieces are waited for: a device may still write to them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use matkv_format::{ChunkFile, Expectation, FormatError, Superblock};
use matkv_sys::{ReadDone, SlotMut, SlotRef};
use matkv_types::{Encoding, KvLayout};
use rayon::prelude::*;

use crate::flash::Unusable;
use crate::growing::Growing;

/// Bytes of a piece, so that a device and those who decode its bytes work at the same time.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces of a file: what an engine takes at once is bounded.
pub(super) const PIECES_MAX: usize = 8;

/// Bytes of the first piece: whoever computes with the first layers need not wait for more.
const FIRST_PIECE_BYTES: usize = 1 << 20;

/// Where pieces of a file begin and end.
pub(super) fn pieces(len: usize) -> Vec<Range<usize>> {
    let first = FIRST_PIECE_BYTES.min(len);
    let piece = (len - first).div_ceil(PIECES_MAX - 1).max(PIECE_BYTES).next_multiple_of(4096);
    let others = (first..len).step_by(piece).map(|start| start..(start + piece).min(len));
    std::iter::once(0..first).chain(others).collect()
}

/// Splits memory at these boundaries; what is left over comes last.
pub(super) fn split(memory: SlotMut, pieces: &[Range<usize>]) -> Vec<SlotMut> {
    let mut out = Vec::with_capacity(pieces.len() + 1);
    let mut rest = memory;
    for piece in pieces {
        if piece.len() == rest.len() {
            break;
        }
        let (first, next) = rest.split(piece.len());
        out.push(first);
        rest = next;
    }
    out.push(rest);
    out
}

/// A file on its way.
pub(super) struct Stream {
    /// Bytes of the file.
    len: usize,
    /// What the index says of it.
    expected: Encoding,
    /// Where its memory begins.
    base: usize,
    /// Pieces that are with the device.
    missing: usize,
    /// The beginning of the file, as far as it is there: nobody writes it any more.
    prefix: Option<SlotRef>,
    /// Pieces whose turn has not come, by where they begin.
    early: BTreeMap<usize, SlotMut>,
    /// Where the layers of a file in another form go; one in its arena form stays where it is.
    slot: Option<Decoded>,
    /// Whoever computes with layers as they come.
    growing: Option<Arc<Growing>>,
    found: Option<Superblock>,
    /// Layers that are verified and in their arena form.
    layers: usize,
    failed: Option<Unusable>,
    /// Spent on decoding.
    decoding: Duration,
}

/// A slot that layers are decoded into.
struct Decoded {
    /// Layers that are there, and what lies before them.
    done: Vec<SlotRef>,
    /// The others.
    rest: Option<SlotMut>,
}

/// How a stream has ended.
pub(super) struct Ended {
    /// What the file says of itself, and the slot it is in, or why it cannot be used.
    pub outcome: Result<(Superblock, SlotRef), Unusable>,
    /// Spent on decoding; nothing if there was nothing to decode.
    pub decoding: Option<Duration>,
}

fn damaged(e: FormatError) -> Unusable {
    Unusable::Damaged(e.to_string())
}

impl Stream {
    /// A file of `len` bytes, written like this as far as the index knows, and the memory its
    /// pieces are read to. With a slot, that is where layers are decoded to; without one the
    /// memory is the slot, and may be longer than the file.
    pub fn new(
        (len, expected): (usize, Encoding),
        memory: SlotMut,
        slot: Option<SlotMut>,
        growing: Option<Arc<Growing>>,
    ) -> (Self, Vec<(Range<usize>, SlotMut)>) {
        let base = memory.range().start;
        let ranges = pieces(len);
        let mut parts = split(memory, &ranges);
        // Memory behind the file is nobody's until the slot is.
        parts.truncate(ranges.len());
        let this = Self {
            len,
            expected,
            base,
            missing: ranges.len(),
            prefix: None,
            early: BTreeMap::new(),
            slot: slot.map(|rest| Decoded { done: Vec::new(), rest: Some(rest) }),
            growing,
            found: None,
            layers: 0,
            failed: None,
            decoding: Duration::ZERO,
        };
        (this, ranges.into_iter().zip(parts).collect())
    }

    /// Takes a piece in.
    pub fn receive(&mut self, piece: ReadDone) {
        self.missing -= 1;
        if let Err(e) = piece.result {
            let reason = match e.kind() {
                std::io::ErrorKind::UnexpectedEof => Unusable::Damaged(e.to_string()),
                _ => Unusable::Unreadable(e.to_string()),
            };
            self.failed.get_or_insert(reason);
        }
        self.early.insert(piece.target.range().start, piece.target);
        while let Some((start, piece)) = self.early.pop_first() {
            self.prefix = match self.prefix.take() {
                None if start == self.base => Some(piece.freeze()),
                Some(prefix) if prefix.range().end == start => {
                    Some(SlotRef::joined(vec![prefix, piece.freeze()]))
                }
                prefix => {
                    self.prefix = prefix;
                    self.early.insert(start, piece);
                    return;
                }
            };
        }
    }

    /// Whether the device has nothing of it any more.
    pub fn is_over(&self) -> bool {
        self.missing == 0
    }

    /// Does what can be done with what is there.
    pub fn advance(&mut self, pool: &rayon::ThreadPool, expect: &Expectation<'_>) {
        if self.failed.is_none()
            && let Err(reason) = self.try_advance(pool, expect)
        {
            self.failed = Some(reason);
        }
    }

    fn try_advance(
        &mut self,
        pool: &rayon::ThreadPool,
        expect: &Expectation<'_>,
    ) -> Result<(), Unusable> {
        let Some(prefix) = &self.prefix else { return Ok(()) };
        let file = &prefix[..prefix.len().min(self.len)];
        let found = match &self.found {
            Some(found) => found,
            None if file.len() < Superblock::kv_offset(expect.tokens.len()) && !self.is_over() => {
                return Ok(());
            }
            None => self.found.insert(self.head(file, expect)?),
        };
        let first = self.layers;
        let there = found.extents().skip(first).take_while(|e| e.end <= file.len()).count();
        match &mut self.slot {
            None => {
                for (i, extent) in found.extents().enumerate().skip(first).take(there) {
                    ChunkFile::verify_layer(file, found, i).map_err(damaged)?;
                    if let Some(growing) = &self.growing {
                        growing.publish(prefix.clone(), extent);
                    }
                }
            }
            Some(slot) if there > 0 => {
                let started = Instant::now();
                let form = found.encoding.in_arena().dtype;
                let stride = KvLayout::new(found.shape, form, found.rows).layer_stride();
                let kv = ChunkFile::kv_range(found.shape, form, found.rows);
                let before = if slot.done.is_empty() { kv.start } else { 0 };
                let end = before + there * stride;
                let rest = slot.rest.as_deref_mut().unwrap_or_default();
                let restored = pool.install(|| {
                    let layers = rest[before..end].par_chunks_exact_mut(stride).enumerate();
                    layers.into_par_iter().try_for_each(|(i, layer)| {
                        ChunkFile::verify_layer(file, found, first + i)?;
                        ChunkFile::restore_layer(file, found, first + i, layer)
                    })
                });
                restored.map_err(damaged)?;
                slot.take_over(end, stride, there, self.growing.as_deref());
                self.decoding += started.elapsed();
            }
            Some(_) => {}
        }
        self.layers += there;
        if self.missing == 0 {
            ChunkFile::verify_tail(file, found).map_err(damaged)?;
            if self.layers != found.shape.layers {
                return Err(Unusable::Damaged("a layer is missing".into()));
            }
        }
        Ok(())
    }

    fn head(&self, file: &[u8], expect: &Expectation<'_>) -> Result<Superblock, Unusable> {
        let found = ChunkFile::verify_head(file, expect).map_err(damaged)?;
        usable(&found, self.len, self.expected)?;
        // Straight into the slot: only the arena form may be used as it is.
        if self.slot.is_none() && !found.encoding.is_arena_form() {
            return Err(Unusable::Unreadable(format!("it is {} by now", found.encoding)));
        }
        Ok(found)
    }

    /// What has come of it, once the device has nothing of it; none before.
    pub fn end(self) -> Option<Ended> {
        if self.missing > 0 {
            return None;
        }
        let decoding = self.slot.is_some().then_some(self.decoding);
        let slot = match self.slot {
            Some(Decoded { mut done, rest }) => {
                done.extend(rest.map(SlotMut::freeze));
                Some(SlotRef::joined(done))
            }
            None => self.prefix,
        };
        let outcome = match (self.failed, self.found.zip(slot)) {
            (Some(reason), _) => Err(reason),
            (None, Some(loaded)) => Ok(loaded),
            (None, None) => Err(Unusable::Unreadable("nothing of it was read".into())),
        };
        Some(Ended { outcome, decoding })
    }
}

impl Decoded {
    /// The first `end` bytes of what is left are final, the last of them `there` layers.
    fn take_over(&mut self, end: usize, stride: usize, there: usize, growing: Option<&Growing>) {
        let Some(rest) = self.rest.take() else { return };
        let front = if end < rest.len() {
            let (front, rest) = rest.freeze_front(end);
            self.rest = Some(rest);
            front
        } else {
            rest.freeze()
        };
        if let Some(growing) = growing {
            let layers = (end - there * stride..end).step_by(stride);
            layers.for_each(|at| growing.publish(front.clone(), at..at + stride));
        }
        self.done.push(front);
    }
}

/// Whether a verified head is that of the file that was asked for.
pub(super) fn usable(found: &Superblock, len: usize, expected: Encoding) -> Result<(), Unusable> {
    if found.file_len() != len {
        let wanted = found.file_len();
        return Err(Unusable::Damaged(format!("file of {len} bytes, expected {wanted}")));
    }
    // The index may be older than the file: another write has replaced it.
    if found.encoding.in_arena() == expected.in_arena() {
        return Ok(());
    }
    Err(Unusable::Unreadable(format!("it is {} by now", found.encoding)))
}

#[cfg(test)]
mod tests {
    use matkv_model::Layers;
    use matkv_sys::Region;
    use matkv_types::{ChunkId, Codec, ContentId, Digest, Fingerprint, KvDtype, KvShape};

    use super::*;
    use crate::growing::Wait;

    const SHAPE: KvShape = KvShape { layers: 7, kv_heads: 3, head_dim: 64 };
    const FP: Fingerprint = Fingerprint(Digest([1; 32]));

    fn expect(tokens: &[u32]) -> Expectation<'_> {
        let chunk_id = ChunkId::new(FP, "default", ContentId::of_tokens(tokens));
        Expectation { fingerprint: FP, chunk_id, tokens, shape: SHAPE, base_position: 3 }
    }

    fn file(tokens: &[u32], dtype: KvDtype, codec: Codec) -> Vec<u8> {
        let layout = KvLayout::new(SHAPE, KvDtype::Bf16, tokens.len());
        let mut rows: Vec<u8> = (0..layout.total_bytes())
            // Noise, as rows are: nothing that a codec could make small.
            .map(|i| (i as u32).wrapping_mul(0x9e37_79b9).rotate_left(15).wrapping_mul(0x85eb_ca6b))
            .enumerate()
            .map(|(i, x)| if i % 2 == 0 { (x >> 24) as u8 } else { 0x3e | (x >> 31) as u8 })
            .collect();
        let mut out = vec![0; ChunkFile::len(SHAPE, dtype, tokens.len())];
        let found = ChunkFile::encode(&mut rows, &mut out, &expect(tokens), dtype).unwrap();
        ChunkFile::compress(&out, &found, codec, 1).unwrap()
    }

    /// Lets pieces of `bytes` arrive in this order, `spoil`ed; asks after each.
    fn arrive(
        bytes: &[u8],
        tokens: &[u32],
        expected: Encoding,
        order: impl Fn(usize) -> Vec<usize>,
        spoil: impl Fn(usize) -> std::io::Result<()>,
    ) -> Result<(Superblock, Vec<u8>), Unusable> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let form = expected.in_arena().dtype;
        let slot_len = ChunkFile::len(SHAPE, form, tokens.len()) + 8192;
        let region = Region::anonymous(slot_len);
        let slot = region.exclusive(0..slot_len).unwrap();
        let growing = Growing::new(KvLayout::new(SHAPE, form, tokens.len()));
        let reader = growing.reader().unwrap();
        let (memory, slot) = if expected.is_arena_form() {
            (slot, None)
        } else {
            (Region::anonymous(bytes.len()).exclusive(0..bytes.len()).unwrap(), Some(slot))
        };
        let (mut stream, pieces) =
            Stream::new((bytes.len(), expected), memory, slot, Some(Arc::clone(&growing)));
        let mut pieces: Vec<Option<_>> = pieces.into_iter().map(Some).collect();
        assert!(pieces.len() > 1, "more than one piece");
        for i in order(pieces.len()) {
            assert!(!stream.is_over());
            let (range, mut target) = pieces[i].take().unwrap();
            target.copy_from_slice(&bytes[range]);
            stream.receive(ReadDone { tag: 1, target, result: spoil(i) });
            stream.advance(&pool, &expect(tokens));
        }
        let outcome = stream.end().unwrap().outcome.map(|(found, slot)| {
            let kv = ChunkFile::kv_range(SHAPE, form, tokens.len());
            let stride = reader_stride(form, tokens.len());
            for (i, layer) in slot[kv].chunks_exact(stride).enumerate() {
                assert_eq!(reader.wait(i, Duration::ZERO), Wait::Ready);
                assert!(reader.layer(i) == layer);
            }
            (found, slot.to_vec())
        });
        // Whatever has come of it, all memory comes back.
        growing.fail();
        drop(reader);
        assert_eq!(region.handles(), 0);
        outcome
    }

    fn reader_stride(form: KvDtype, rows: usize) -> usize {
        KvLayout::new(SHAPE, form, rows).layer_stride()
    }

    fn encodings() -> [Encoding; 4] {
        [
            Encoding::new(KvDtype::Bf16, Codec::None),
            Encoding::new(KvDtype::Int8, Codec::None),
            Encoding::new(KvDtype::Int8, Codec::Zstd),
            Encoding::new(KvDtype::Bf16, Codec::SplitZstd),
        ]
    }

    fn orders() -> [fn(usize) -> Vec<usize>; 3] {
        [
            |n| (0..n).collect(),
            |n| (0..n).rev().collect(),
            |n| (0..n).filter(|i| i % 2 == 1).chain((0..n).filter(|i| i % 2 == 0)).collect(),
        ]
    }

    #[test]
    fn pieces_in_any_order_make_the_same_chunk() {
        let tokens: Vec<u32> = (0..3000).collect();
        for encoding in encodings() {
            let bytes = file(&tokens, encoding.dtype, encoding.codec);
            let found = ChunkFile::verify(&bytes, &expect(&tokens)).unwrap();
            let form = encoding.in_arena().dtype;
            let kv = ChunkFile::kv_range(SHAPE, form, tokens.len());
            let mut wanted = vec![0; kv.len()];
            crate::compile::restore(&bytes, &found, &mut wanted).unwrap();
            for order in orders() {
                let loaded = arrive(&bytes, &tokens, encoding, order, |_| Ok(()));
                let (head, slot) = loaded.unwrap();
                assert_eq!(head, found);
                assert!(slot[kv.clone()] == wanted, "{encoding}");
            }
        }
    }

    #[test]
    fn a_bad_byte_anywhere_spoils_it_and_all_memory_comes_back() {
        let tokens: Vec<u32> = (0..3000).collect();
        for encoding in encodings() {
            let good = file(&tokens, encoding.dtype, encoding.codec);
            let kv = Superblock::kv_offset(tokens.len());
            let at = [0, 50, 4096 + 9, kv - 1, kv, good.len() / 2, good.len() - 1];
            for (at, order) in at.into_iter().zip(orders().into_iter().cycle()) {
                let mut bytes = good.clone();
                bytes[at] ^= 4;
                let outcome = arrive(&bytes, &tokens, encoding, order, |_| Ok(()));
                assert!(matches!(outcome, Err(Unusable::Damaged(_))), "{encoding} at {at}");
            }
        }
    }

    #[test]
    fn a_piece_that_cannot_be_read_is_not_damage() {
        let tokens: Vec<u32> = (0..3000).collect();
        let encoding = encodings()[1];
        let bytes = file(&tokens, encoding.dtype, encoding.codec);
        for order in orders() {
            let spoil = |i| if i == 1 { Err(std::io::Error::other("EIO")) } else { Ok(()) };
            let outcome = arrive(&bytes, &tokens, encoding, order, spoil);
            assert!(matches!(outcome, Err(Unusable::Unreadable(_))));
        }
        // Another file than the index says: not its fault, but not what there is room for either.
        let other = Encoding::new(KvDtype::Bf16, Codec::None);
        let outcome = arrive(&bytes, &tokens, other, orders()[0], |_| Ok(()));
        assert!(matches!(outcome, Err(Unusable::Unreadable(_))), "{outcome:?}");
    }

    #[test]
    fn a_file_is_cut_at_pages_and_not_too_often() {
        for len in [4096, PIECE_BYTES, PIECE_BYTES + 4096, 100 << 20, (100 << 20) + 8192] {
            let cut = pieces(len);
            assert!(cut.len() <= PIECES_MAX);
            assert!(cut.iter().all(|p| p.start.is_multiple_of(4096) && !p.is_empty()));
            assert!(cut.windows(2).all(|w| w[0].end == w[1].start));
            assert_eq!((cut[0].start, cut[cut.len() - 1].end), (0, len));
        }
    }
}
