//! GreedyDual-Size-Frequency: what costs much to get back, is used often and takes few bytes
//! stays.
//!
//! Value `H = L + frequency · cost / bytes`; `L` is the value of the last one evicted, so that
//! what is not used any more is overtaken in time.

use std::collections::{BTreeSet, HashMap};

use super::{Item, Key, Policy};

#[derive(Clone, Copy)]
struct Entry {
    item: Item,
    value: u64,
    arrival: u64,
}

/// Least value per byte first.
pub struct Gdsf<K> {
    entries: HashMap<K, Entry>,
    /// By value, then by last use.
    order: BTreeSet<(u64, u64, K)>,
    floor: f64,
    clock: u64,
}

impl<K> Default for Gdsf<K> {
    fn default() -> Self {
        Self { entries: HashMap::new(), order: BTreeSet::new(), floor: 0.0, clock: 0 }
    }
}

impl<K: Key> Gdsf<K> {
    fn place(&mut self, key: K, item: Item) {
        self.remove(&key);
        self.clock += 1;
        let value = self.floor + item.frequency * item.cost.max(0.0) / item.bytes.max(1) as f64;
        // Bits of a number that is not negative are in its order.
        let entry = Entry { item, value: value.to_bits(), arrival: self.clock };
        self.entries.insert(key, entry);
        self.order.insert((entry.value, entry.arrival, key));
    }
}

impl<K: Key> Policy<K> for Gdsf<K> {
    fn insert(&mut self, key: K, item: Item) {
        self.place(key, item);
    }

    fn access(&mut self, key: &K) {
        if let Some(entry) = self.entries.get(key) {
            let item = Item { frequency: entry.item.frequency + 1.0, ..entry.item };
            self.place(*key, item);
        }
    }

    fn remove(&mut self, key: &K) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&(entry.value, entry.arrival, *key));
        }
    }

    fn evict(&mut self, may_leave: &mut dyn FnMut(&K) -> bool) -> Option<K> {
        let &(value, _, victim) = self.order.iter().find(|(_, _, k)| may_leave(k))?;
        self.floor = self.floor.max(f64::from_bits(value));
        self.remove(&victim);
        Some(victim)
    }

    fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    fn len(&self) -> usize {
        self.entries.len()
    }
}
