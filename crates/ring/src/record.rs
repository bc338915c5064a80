//! The sequence record: segment list, slots and sampling of one request, as words in its own
//! slot. Written once by A before it publishes, read once by B.

use matkv_types::{KvDtype, Sampling};

/// A chunk slot a sequence reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRecord {
    /// First byte in the segment.
    pub start: usize,
    /// End.
    pub end: usize,
    /// Byte offset of the KV section in the slot.
    pub kv_offset: usize,
    /// Rows the section was laid out for.
    pub rows: usize,
    /// Element type of its rows.
    pub dtype: KvDtype,
}

/// A run of rows a sequence attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRecord {
    /// Index into the slots, or none for the sequence's own section.
    pub slot: Option<usize>,
    /// First row.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Prompt position of the first row.
    pub position: usize,
    /// Prompt position minus compiled position.
    pub shift: i64,
}

/// Everything B needs to decode a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceRecord {
    /// Slots of chunks and of the prefix.
    pub slots: Vec<SlotRecord>,
    /// Segments in prompt order; the last one is the run B appends to.
    pub segments: Vec<SegmentRecord>,
    /// Rows the own section was laid out for.
    pub own_rows: usize,
    /// Prompt position of the next token to compute.
    pub position: usize,
    /// How to draw tokens.
    pub sampling: Sampling,
}

/// Why a record is not one.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RecordError {
    /// It ends too early.
    #[error("sequence record ends after {words} words")]
    Short {
        /// Words there are.
        words: usize,
    },
    /// A field cannot be what it says.
    #[error("sequence record: {field} is {found}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u64,
    },
}

/// Most slots, segments, and stop strings a record may name; bounds what B allocates.
const LIST_MAX: u64 = 4096;
const STOP_BYTES_MAX: u64 = 1 << 16;
/// Rows of a section: at up to 2²⁰ bytes a row their product stays far from overflow.
const ROWS_MAX: u64 = 1 << 32;
const OWN: u64 = u64::MAX;

impl SequenceRecord {
    /// Words of a record, before its slots are known.
    pub fn encoded_len(slots: usize, segments: usize, stops: &[String]) -> usize {
        let stops: usize = stops.iter().map(|s| 1 + s.len().div_ceil(8)).sum();
        4 + 5 * slots + 5 * segments + 5 + stops
    }

    /// To words.
    pub fn encode(&self) -> Vec<u64> {
        let n = |x: usize| x as u64;
        let mut w = vec![n(self.slots.len()), n(self.segments.len()), n(self.own_rows)];
        w.push(n(self.position));
        for s in &self.slots {
            let dtype = u64::from(s.dtype.code());
            w.extend([n(s.start), n(s.end), n(s.kv_offset), n(s.rows), dtype]);
        }
        for s in &self.segments {
            let slot = s.slot.map_or(OWN, n);
            w.extend([slot, n(s.first_row), n(s.rows), n(s.position), s.shift as u64]);
        }
        let sampling = &self.sampling;
        w.extend([
            u64::from(sampling.temperature.to_bits()),
            u64::from(sampling.top_p.to_bits()),
            sampling.seed,
            u64::from(sampling.max_new_tokens),
            n(sampling.stop.len()),
        ]);
        for stop in &sampling.stop {
            w.push(n(stop.len()));
            w.extend(stop.as_bytes().chunks(8).map(|bytes| {
                let mut word = [0; 8];
                word[..bytes.len()].copy_from_slice(bytes);
                u64::from_le_bytes(word)
            }));
        }
        w
    }

    /// From words a peer wrote.
    ///
    /// # Errors
    /// If they are not a record. Slots and rows are checked for consistency here, against the
    /// arena by the caller.
    pub fn decode(words: &[u64]) -> Result<Self, RecordError> {
        let mut r = Reader { words, at: 0 };
        let slots = r.count("slot count", LIST_MAX)?;
        let segments = r.count("segment count", LIST_MAX)?;
        let own_rows = r.count("own rows", ROWS_MAX)?;
        let position = r.size("position")?;
        let slots: Vec<SlotRecord> = (0..slots).map(|_| r.slot()).collect::<Result<_, _>>()?;
        let segments: Vec<SegmentRecord> =
            (0..segments).map(|_| r.segment(&slots, own_rows)).collect::<Result<_, _>>()?;
        let sampling = r.sampling()?;
        let ends_own = segments.last().is_some_and(|s| s.slot.is_none());
        if !ends_own {
            return Err(RecordError::Invalid {
                field: "last segment",
                found: segments.len() as u64,
            });
        }
        Ok(Self { slots, segments, own_rows, position, sampling })
    }
}

struct Reader<'a> {
    words: &'a [u64],
    at: usize,
}

impl Reader<'_> {
    fn next(&mut self) -> Result<u64, RecordError> {
        let word = self.words.get(self.at).copied();
        self.at += 1;
        word.ok_or(RecordError::Short { words: self.words.len() })
    }

    fn count(&mut self, field: &'static str, max: u64) -> Result<usize, RecordError> {
        match self.next()? {
            n if n <= max => Ok(n as usize),
            found => Err(RecordError::Invalid { field, found }),
        }
    }

    /// A size or position: anything that cannot overflow later arithmetic.
    fn size(&mut self, field: &'static str) -> Result<usize, RecordError> {
        self.count(field, 1 << 48)
    }

    fn slot(&mut self) -> Result<SlotRecord, RecordError> {
        let (start, end) = (self.size("slot start")?, self.size("slot end")?);
        let (kv_offset, rows) = (self.size("KV offset")?, self.count("slot rows", ROWS_MAX)?);
        let code = self.next()?;
        // Forms at rest never reach the arena.
        let dtype = u32::try_from(code).ok().and_then(KvDtype::from_code);
        let dtype = dtype.filter(|d| d.in_arena() == *d);
        let dtype = dtype.ok_or(RecordError::Invalid { field: "row type", found: code })?;
        Ok(SlotRecord { start, end, kv_offset, rows, dtype })
    }

    fn segment(&mut self, slots: &[SlotRecord], own: usize) -> Result<SegmentRecord, RecordError> {
        let slot = match self.next()? {
            OWN => None,
            n if n < slots.len() as u64 => Some(n as usize),
            found => return Err(RecordError::Invalid { field: "slot index", found }),
        };
        let (first_row, rows) = (self.size("first row")?, self.size("rows")?);
        let position = self.size("segment position")?;
        let shift = self.next()? as i64;
        let room = slot.map_or(own, |s| slots[s].rows);
        if first_row + rows > room {
            return Err(RecordError::Invalid {
                field: "last row",
                found: (first_row + rows) as u64,
            });
        }
        if shift.unsigned_abs() > 1 << 48 {
            return Err(RecordError::Invalid { field: "shift", found: shift as u64 });
        }
        Ok(SegmentRecord { slot, first_row, rows, position, shift })
    }

    fn float(&mut self, field: &'static str) -> Result<f32, RecordError> {
        let found = self.next()?;
        let value = u32::try_from(found).map(f32::from_bits).ok().filter(|x| x.is_finite());
        value.ok_or(RecordError::Invalid { field, found })
    }

    fn sampling(&mut self) -> Result<Sampling, RecordError> {
        let (temperature, top_p) = (self.float("temperature")?, self.float("top_p")?);
        let seed = self.next()?;
        let max_new_tokens = self.count("max_new_tokens", u64::from(u32::MAX))? as u32;
        let count = self.count("stop count", LIST_MAX)?;
        let stop = (0..count).map(|_| self.text()).collect::<Result<_, _>>()?;
        Ok(Sampling { temperature, top_p, seed, max_new_tokens, stop })
    }

    fn text(&mut self) -> Result<String, RecordError> {
        let len = self.count("stop length", STOP_BYTES_MAX)?;
        let mut bytes = Vec::with_capacity(len);
        for _ in 0..len.div_ceil(8) {
            bytes.extend(self.next()?.to_le_bytes());
        }
        bytes.truncate(len);
        let found = len as u64;
        String::from_utf8(bytes).map_err(|_| RecordError::Invalid { field: "stop text", found })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> SequenceRecord {
        let slot =
            SlotRecord { start: 4096, end: 8192, kv_offset: 4096, rows: 300, dtype: KvDtype::Bf16 };
        let segment = |slot, first_row, rows, position, shift| SegmentRecord {
            slot,
            first_row,
            rows,
            position,
            shift,
        };
        SequenceRecord {
            slots: vec![slot, SlotRecord { start: 8192, ..slot }],
            segments: vec![
                segment(Some(0), 0, 31, 0, 0),
                segment(Some(1), 32, 268, 1087, -1024),
                segment(None, 32, 24, 1355, 0),
            ],
            own_rows: 200,
            position: 1379,
            sampling: Sampling {
                temperature: 0.7,
                stop: vec!["\n\nQ:".into(), "a longer stop string é".into()],
                ..Sampling::default()
            },
        }
    }

    #[test]
    fn round_trip_and_every_truncation() {
        let words = record().encode();
        assert_eq!(SequenceRecord::decode(&words), Ok(record()));
        let r = record();
        let len = SequenceRecord::encoded_len(r.slots.len(), r.segments.len(), &r.sampling.stop);
        assert_eq!(len, words.len());
        for n in 0..words.len() {
            assert!(SequenceRecord::decode(&words[..n]).is_err(), "{n} words");
        }
    }

    proptest! {
        /// Any flipped word decodes to an error or to a record that is consistent in itself.
        #[test]
        fn nonsense_is_refused(at in any::<usize>(), value in any::<u64>()) {
            let mut words = record().encode();
            let at = at % words.len();
            words[at] = value;
            if let Ok(r) = SequenceRecord::decode(&words) {
                for s in &r.segments {
                    let room = s.slot.map_or(r.own_rows, |i| r.slots[i].rows);
                    prop_assert!(s.first_row + s.rows <= room);
                }
            }
        }
    }
}
