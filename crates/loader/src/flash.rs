//! The reasons not to use a stored chunk.

/// Why a stored chunk is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// No tier has it.
    #[error("its file is missing")]
    Missing,
    /// It has left every tier.
    #[error("it has been evicted")]
    Evicted,
    /// The file is wrong: kept aside, replaced.
    #[error("{0}")]
    Damaged(String),
    /// The system would not read it; it may be whole.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Reading did not end in time; it may be whole.
    #[error("not loaded in {0} ms")]
    Late(u64),
    /// Computing it takes less time.
    #[error("loading takes {load_ms} ms, computing {compute_ms} ms")]
    Slower {
        /// Expected.
        load_ms: u64,
        /// Expected.
        compute_ms: u64,
    },
    /// Loads from there have failed: not tried for a while.
    #[error("not tried: {0}")]
    Paused(String),
    /// Somebody wants it computed.
    #[error("asked to compute it")]
    Asked,
}

impl Unusable {
    /// Whether its place on flash should be written again once it is computed. What may be whole
    /// is not written over.
    pub fn should_be_stored(&self) -> bool {
        matches!(self, Self::Missing | Self::Evicted | Self::Damaged(_))
    }

    /// Label of `load_skipped`; none if a load was tried, or there was nothing to load.
    pub fn skipped(&self) -> Option<&'static str> {
        match self {
            Self::Slower { .. } => Some("slower"),
            Self::Paused(_) => Some("paused"),
            Self::Asked => Some("asked"),
            Self::Missing
            | Self::Evicted
            | Self::Damaged(_)
            | Self::Unreadable(_)
            | Self::Late(_) => None,
        }
    }

    /// Whether it is a defect somebody should look at.
    pub fn is_fault(&self) -> bool {
        !matches!(self, Self::Evicted | Self::Slower { .. } | Self::Asked)
    }
}
