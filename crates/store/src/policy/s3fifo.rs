//! S3-FIFO: a small queue filters what is used once, a main queue keeps the rest, and a ghost
//! queue remembers what the small one dropped.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{Item, Key, Policy};

/// The small queue's share of the bytes, as in the paper.
const SMALL_SHARE: f64 = 0.1;
/// Uses counted up to here.
const FREQUENCY_MAX: u8 = 3;

#[derive(Clone, Copy)]
struct Entry {
    bytes: u64,
    uses: u8,
    small: bool,
    /// Which of the queue's records of this key is the valid one.
    stamp: u64,
}

/// Three FIFO queues.
pub struct S3Fifo<K> {
    entries: HashMap<K, Entry>,
    small: VecDeque<(K, u64)>,
    main: VecDeque<(K, u64)>,
    ghost: VecDeque<K>,
    in_ghost: HashSet<K>,
    small_bytes: u64,
    bytes: u64,
    clock: u64,
}

impl<K> Default for S3Fifo<K> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: VecDeque::new(),
            in_ghost: HashSet::new(),
            small_bytes: 0,
            bytes: 0,
            clock: 0,
        }
    }
}

impl<K: Key> S3Fifo<K> {
    fn push(&mut self, key: K, bytes: u64, uses: u8, small: bool) {
        self.clock += 1;
        self.entries.insert(key, Entry { bytes, uses, small, stamp: self.clock });
        self.bytes += bytes;
        if small {
            self.small_bytes += bytes;
            self.small.push_back((key, self.clock));
        } else {
            self.main.push_back((key, self.clock));
        }
        // Records of those that have moved on stay in the queues until they are popped, or are
        // too many.
        if self.small.len() + self.main.len() > 2 * self.entries.len() + 64 {
            let valid =
                |(key, stamp): &(K, u64)| self.entries.get(key).is_some_and(|e| e.stamp == *stamp);
            self.small.retain(valid);
            self.main.retain(valid);
        }
    }

    /// Where it was: at the head of its queue.
    fn put_back(&mut self, key: K, entry: Entry) {
        self.entries.insert(key, entry);
        self.bytes += entry.bytes;
        if entry.small {
            self.small_bytes += entry.bytes;
            self.small.push_front((key, entry.stamp));
        } else {
            self.main.push_front((key, entry.stamp));
        }
    }

    fn take(&mut self, key: &K) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        if entry.small {
            self.small_bytes -= entry.bytes;
        }
        Some(entry)
    }

    /// The oldest valid record of a queue.
    fn pop(&mut self, small: bool) -> Option<(K, Entry)> {
        let queue = if small { &mut self.small } else { &mut self.main };
        while let Some((key, stamp)) = queue.pop_front() {
            if self.entries.get(&key).is_some_and(|e| e.stamp == stamp) {
                return self.take(&key).map(|entry| (key, entry));
            }
        }
        None
    }

    fn remember(&mut self, key: K) {
        if self.in_ghost.insert(key) {
            self.ghost.push_back(key);
        }
        while self.ghost.len() > self.entries.len().max(16) {
            if let Some(old) = self.ghost.pop_front() {
                self.in_ghost.remove(&old);
            }
        }
    }
}

impl<K: Key> Policy<K> for S3Fifo<K> {
    fn insert(&mut self, key: K, item: Item) {
        if let Some(old) = self.take(&key) {
            return self.push(key, item.bytes, old.uses, old.small);
        }
        let seen = self.in_ghost.remove(&key);
        if seen {
            self.ghost.retain(|k| *k != key);
        }
        self.push(key, item.bytes, 0, !seen);
    }

    fn access(&mut self, key: &K) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.uses = (entry.uses + 1).min(FREQUENCY_MAX);
        }
    }

    fn remove(&mut self, key: &K) {
        self.take(key);
    }

    fn evict(&mut self, may_leave: &mut dyn FnMut(&K) -> bool) -> Option<K> {
        // Those that may not leave stand aside meanwhile, so that no queue hides the other.
        let mut refused = Vec::new();
        let victim = loop {
            let small = self.small_bytes as f64 >= SMALL_SHARE * self.bytes as f64;
            let next = self.pop(small).map(|e| (e, small));
            let next = next.or_else(|| self.pop(!small).map(|e| (e, !small)));
            let Some(((key, entry), small)) = next else { break None };
            if small && entry.uses > 1 {
                self.push(key, entry.bytes, 0, false);
            } else if !small && entry.uses > 0 {
                self.push(key, entry.bytes, entry.uses - 1, false);
            } else if may_leave(&key) {
                if small {
                    self.remember(key);
                }
                break Some(key);
            } else {
                refused.push((key, entry));
            }
        };
        for (key, entry) in refused.into_iter().rev() {
            self.put_back(key, entry);
        }
        victim
    }

    fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    fn len(&self) -> usize {
        self.entries.len()
    }
}
