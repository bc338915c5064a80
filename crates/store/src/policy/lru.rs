//! Least recently used, with or without neighbours.

use std::collections::{BTreeMap, HashMap};

use super::{Item, Key, Policy};

/// Half of all ticks lie below, for what nobody has asked for yet.
const FIRST_TICK: u64 = 1 << 62;

/// Least recently used first; what was never used before all others, in order of arrival.
pub struct Lru<K> {
    ticks: HashMap<K, u64>,
    order: BTreeMap<u64, K>,
    clock: u64,
    cold_clock: u64,
    /// Whether a use nearby counts.
    semantic: bool,
}

impl<K: Key> Lru<K> {
    /// An empty one.
    pub fn new(semantic: bool) -> Self {
        let (ticks, order) = (HashMap::new(), BTreeMap::new());
        Self { ticks, order, clock: FIRST_TICK, cold_clock: 0, semantic }
    }

    fn place(&mut self, key: K, cold: bool) {
        let clock = if cold { &mut self.cold_clock } else { &mut self.clock };
        *clock += 1;
        if let Some(old) = self.ticks.insert(key, *clock) {
            self.order.remove(&old);
        }
        self.order.insert(*clock, key);
    }
}

impl<K: Key> Policy<K> for Lru<K> {
    fn insert(&mut self, key: K, item: Item) {
        self.place(key, item.frequency == 0.0);
    }

    fn access(&mut self, key: &K) {
        if self.ticks.contains_key(key) {
            self.place(*key, false);
        }
    }

    fn warm(&mut self, key: &K) {
        if self.semantic {
            self.access(key);
        }
    }

    fn remove(&mut self, key: &K) {
        if let Some(tick) = self.ticks.remove(key) {
            self.order.remove(&tick);
        }
    }

    fn evict(&mut self, may_leave: &mut dyn FnMut(&K) -> bool) -> Option<K> {
        let victim = *self.order.values().find(|k| may_leave(k))?;
        self.remove(&victim);
        Some(victim)
    }

    fn contains(&self, key: &K) -> bool {
        self.ticks.contains_key(key)
    }

    fn len(&self) -> usize {
        self.ticks.len()
    }
}
