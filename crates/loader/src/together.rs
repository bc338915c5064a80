//! Which chunks are used together: who has been seen beside whom, most often first.

use std::collections::{HashMap, VecDeque};

use matkv_types::ChunkId;

/// Chunks remembered; the oldest are forgotten.
const CHUNKS_MAX: usize = 1 << 16;
/// Partners remembered of each.
const PARTNERS_MAX: usize = 8;

/// What was retrieved together.
#[derive(Default)]
pub(crate) struct Together {
    partners: HashMap<ChunkId, Vec<(ChunkId, u32)>>,
    order: VecDeque<ChunkId>,
}

impl Together {
    /// These were used by one request.
    pub fn used(&mut self, ids: &[ChunkId]) {
        for id in ids {
            if !self.partners.contains_key(id) {
                self.order.push_back(*id);
                if self.order.len() > CHUNKS_MAX
                    && let Some(old) = self.order.pop_front()
                {
                    self.partners.remove(&old);
                }
            }
            let list = self.partners.entry(*id).or_default();
            for other in ids.iter().filter(|o| *o != id) {
                match list.iter_mut().find(|(p, _)| p == other) {
                    Some((_, count)) => *count += 1,
                    None => {
                        // Whoever was seen least makes room.
                        if list.len() == PARTNERS_MAX {
                            list.pop();
                        }
                        list.push((*other, 1));
                    }
                }
            }
            list.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        }
    }

    /// Who was used with these before, most often first.
    pub fn partners(&self, ids: &[ChunkId]) -> Vec<ChunkId> {
        let mut counts: HashMap<ChunkId, u32> = HashMap::new();
        for (partner, count) in ids.iter().filter_map(|id| self.partners.get(id)).flatten() {
            if !ids.contains(partner) {
                *counts.entry(*partner).or_default() += count;
            }
        }
        let mut out: Vec<(ChunkId, u32)> = counts.into_iter().collect();
        out.sort_by_key(|(id, count)| (std::cmp::Reverse(*count), *id));
        out.into_iter().map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use matkv_types::Digest;

    use super::*;

    fn id(n: u8) -> ChunkId {
        ChunkId(Digest([n; 32]))
    }

    #[test]
    fn what_was_used_together_comes_back_most_often_first() {
        let mut together = Together::default();
        for ids in [[1, 2, 3], [1, 2, 4], [1, 2, 5], [6, 3, 7]] {
            together.used(&ids.map(id));
        }
        assert_eq!(together.partners(&[id(1)])[0], id(2));
        assert_eq!(together.partners(&[id(1), id(2)]), [id(3), id(4), id(5)]);
        assert_eq!(together.partners(&[id(9)]), []);
        // Bounded, and frequent partners survive the rare ones.
        for n in 20..60 {
            together.used(&[id(1), id(n)]);
        }
        assert_eq!(together.partners(&[id(1)]).len(), PARTNERS_MAX);
        assert_eq!(together.partners(&[id(1)])[0], id(2));
    }
}
