//! What leaves a tier when it is full: one trait, four policies.
//!
//! A policy keeps an order over what is resident; it moves no bytes. Who may not leave (pinned,
//! on loan) is the caller's to say, at the moment of eviction.

mod gdsf;
mod lru;
mod s3fifo;

use std::fmt::Debug;
use std::hash::Hash;

pub use gdsf::Gdsf;
pub use lru::Lru;
pub use s3fifo::S3Fifo;

/// What identifies a resident.
pub trait Key: Copy + Eq + Hash + Ord + Debug + Send {}
impl<T: Copy + Eq + Hash + Ord + Debug + Send> Key for T {}

/// What a policy may weigh of something resident.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Bytes it takes.
    pub bytes: u64,
    /// Seconds it takes to get it back once it is gone.
    pub cost: f64,
    /// Uses known so far, decayed; 0 for what nobody has asked for yet.
    pub frequency: f64,
}

/// An order of eviction.
pub trait Policy<K: Key>: Send {
    /// Something has become resident, or has changed.
    fn insert(&mut self, key: K, item: Item);

    /// It has been used.
    fn access(&mut self, key: &K);

    /// Something near it in embedding space has been used.
    fn warm(&mut self, _key: &K) {}

    /// It is gone, by no decision of the policy's.
    fn remove(&mut self, key: &K);

    /// Takes out the least valuable one that may leave.
    fn evict(&mut self, may_leave: &mut dyn FnMut(&K) -> bool) -> Option<K>;

    /// Whether it is resident.
    fn contains(&self, key: &K) -> bool;

    /// Residents.
    fn len(&self) -> usize;

    /// Whether nothing is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A policy by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// Least recently used first.
    Lru,
    /// Three FIFO queues (Yang et al. 2023, "FIFO queues are all you need for cache eviction").
    S3Fifo,
    /// GreedyDual-Size-Frequency (Cherkasova 1998): value per byte.
    Gdsf,
    /// LRU in which a use also warms the nearest chunks in embedding space.
    SemanticLru,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Lru, Self::S3Fifo, Self::Gdsf, Self::SemanticLru];

    /// Name in the configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::S3Fifo => "s3fifo",
            Self::Gdsf => "gdsf",
            Self::SemanticLru => "semantic-lru",
        }
    }

    /// An empty one.
    pub fn build<K: Key + 'static>(self) -> Box<dyn Policy<K>> {
        match self {
            Self::Lru => Box::new(Lru::new(false)),
            Self::SemanticLru => Box::new(Lru::new(true)),
            Self::S3Fifo => Box::new(S3Fifo::default()),
            Self::Gdsf => Box::new(Gdsf::default()),
        }
    }
}
