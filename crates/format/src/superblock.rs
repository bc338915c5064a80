//! The superblock: 4,096 bytes that say everything else about the file.

use std::ops::Range;

use matkv_types::{
    ChunkId, Codec, Digest, Encoding, Fingerprint, KvDtype, KvLayout, KvShape, LayoutId,
    PAGE_BYTES, align_up,
};

use crate::error::FormatError;

/// First eight bytes of every chunk file.
pub const MAGIC: [u8; 8] = *b"MATKV.KV";
/// The version this build reads and writes.
pub const FORMAT_VERSION: u32 = 1;

/// Byte offset of the extent checksums.
const CHECKSUMS_AT: usize = 192;
/// Byte offset of the extents' stored lengths, where there is a codec.
const LENGTHS_AT: usize = 2144;
/// Byte offset of the superblock's own checksum.
const OWN_CHECKSUM_AT: usize = PAGE_BYTES - 4;
/// Layers a superblock has room for.
pub(crate) const LAYERS_MAX: usize = (OWN_CHECKSUM_AT - LENGTHS_AT) / 4;
/// Compressed extents begin at cache lines.
pub(crate) const EXTENT_ALIGN: usize = 64;
/// Bounds of what a file may say of its shape; each is far above any model's.
const HEADS_MAX: usize = 1 << 12;
const HEAD_DIM_MAX: usize = 1 << 12;
const ROWS_MAX: usize = 1 << 24;

const _: () = assert!(
    LAYERS_MAX >= 480 && LENGTHS_AT >= CHECKSUMS_AT + 4 * LAYERS_MAX,
    "room for the deepest known models"
);

/// What a chunk file says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// What the chunk was compiled with.
    pub fingerprint: Fingerprint,
    /// Identity of the chunk.
    pub chunk_id: ChunkId,
    /// How its rows are written.
    pub encoding: Encoding,
    /// Shape of its rows.
    pub shape: KvShape,
    /// Number of rows, one per token.
    pub rows: usize,
    /// Position of the first row: the prefix length.
    pub base_position: usize,
    /// CRC32C of the token section.
    pub token_checksum: u32,
    /// CRC32C of each layer's extent, as stored.
    pub extent_checksums: Vec<u32>,
    /// Stored bytes of each layer's extent: the layer stride where it is not compressed.
    pub extent_bytes: Vec<u32>,
}

impl Superblock {
    /// Byte offset of the KV section of a file with this many rows.
    pub const fn kv_offset(rows: usize) -> usize {
        PAGE_BYTES + align_up(rows * 4, PAGE_BYTES)
    }

    /// Arithmetic of the KV section.
    pub fn layout(&self) -> KvLayout {
        KvLayout::new(self.shape, self.encoding.dtype, self.rows)
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> usize {
        let end = self.extents().last().map_or(Self::kv_offset(self.rows), |e| e.end);
        align_up(end, PAGE_BYTES)
    }

    /// CRC32C of the superblock: which of several writes of a chunk this is.
    pub fn checksum(&self) -> u32 {
        let page = self.encode();
        u32::from_le_bytes([
            page[OWN_CHECKSUM_AT],
            page[OWN_CHECKSUM_AT + 1],
            page[OWN_CHECKSUM_AT + 2],
            page[OWN_CHECKSUM_AT + 3],
        ])
    }

    /// Where each layer's extent lies in the file. Uncompressed ones lie a layer stride apart,
    /// compressed ones one after another.
    pub fn extents(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut next = Self::kv_offset(self.rows);
        self.extent_bytes.iter().map(move |&bytes| {
            let start = next;
            let end = start + bytes as usize;
            next = align_up(end, EXTENT_ALIGN);
            start..end
        })
    }

    /// The token ids in a file of this superblock.
    ///
    /// # Errors
    /// If the file ends before them or their checksum is wrong.
    pub fn tokens(&self, file: &[u8]) -> Result<Vec<u32>, FormatError> {
        let kv = Self::kv_offset(self.rows);
        let Some(section) = file.get(PAGE_BYTES..kv) else {
            return Err(FormatError::Length { expected: kv, found: file.len() });
        };
        let found = crc32c::crc32c(section);
        if found != self.token_checksum {
            let (what, expected) = ("token ids".to_owned(), self.token_checksum);
            return Err(FormatError::Checksum { what, expected, found });
        }
        let token = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        Ok(section.chunks_exact(4).take(self.rows).map(token).collect())
    }

    /// Writes the superblock.
    pub(crate) fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut out = [0u8; PAGE_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&FORMAT_VERSION.to_le_bytes());
        put(&(PAGE_BYTES as u32).to_le_bytes());
        put(self.fingerprint.as_bytes());
        put(self.chunk_id.as_bytes());
        let e = &self.encoding;
        for word in [
            e.layout.code(),
            e.dtype.code(),
            e.codec.code(),
            self.shape.layers as u32,
            self.shape.kv_heads as u32,
            self.shape.head_dim as u32,
            self.rows as u32,
            self.base_position as u32,
            self.token_checksum,
        ] {
            put(&word.to_le_bytes());
        }
        put(&[0; 4]);
        for word in [Self::kv_offset(self.rows), self.layout().layer_stride(), self.file_len()] {
            put(&(word as u64).to_le_bytes());
        }
        debug_assert!(at <= CHECKSUMS_AT);
        for (i, sum) in self.extent_checksums.iter().enumerate() {
            out[CHECKSUMS_AT + 4 * i..CHECKSUMS_AT + 4 * i + 4].copy_from_slice(&sum.to_le_bytes());
        }
        if self.encoding.codec != Codec::None {
            for (i, bytes) in self.extent_bytes.iter().enumerate() {
                let at = LENGTHS_AT + 4 * i;
                out[at..at + 4].copy_from_slice(&bytes.to_le_bytes());
            }
        }
        let own = crc32c::crc32c(&out[..OWN_CHECKSUM_AT]);
        out[OWN_CHECKSUM_AT..].copy_from_slice(&own.to_le_bytes());
        out
    }

    /// Reads a superblock. Magic, version and the own checksum come first; only then are sizes
    /// believed, and they are checked against each other.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let Some(page) = bytes.get(..PAGE_BYTES) else {
            return Err(FormatError::Length { expected: PAGE_BYTES, found: bytes.len() });
        };
        let mut r = Reader { page, at: 0 };
        let magic: [u8; 8] = r.array();
        if magic != MAGIC {
            return Err(FormatError::Magic { found: magic });
        }
        let version = r.word();
        if version != FORMAT_VERSION {
            return Err(FormatError::Version { expected: FORMAT_VERSION, found: version });
        }
        let own = crc32c::crc32c(&page[..OWN_CHECKSUM_AT]);
        let said = Reader { page, at: OWN_CHECKSUM_AT }.word();
        if own != said {
            let what = "superblock".to_owned();
            return Err(FormatError::Checksum { what, expected: said, found: own });
        }
        Self::fields(r)
    }

    fn fields(mut r: Reader<'_>) -> Result<Self, FormatError> {
        let page_bytes = r.word();
        field("page size", PAGE_BYTES as u64, u64::from(page_bytes))?;
        let fingerprint = Fingerprint(Digest(r.array()));
        let chunk_id = ChunkId(Digest(r.array()));
        let (layout, dtype, codec) = (r.word(), r.word(), r.word());
        let unknown = |field: &'static str, code: u32| FormatError::Field {
            field,
            expected: "a code this build knows".into(),
            found: code.to_string(),
        };
        let encoding = Encoding {
            layout: LayoutId::from_code(layout).ok_or_else(|| unknown("layout", layout))?,
            dtype: KvDtype::from_code(dtype)
                .filter(|d| *d != KvDtype::F32)
                .ok_or_else(|| unknown("row type", dtype))?,
            codec: Codec::from_code(codec).ok_or_else(|| unknown("codec", codec))?,
        };
        let shape = KvShape {
            layers: r.word() as usize,
            kv_heads: r.word() as usize,
            head_dim: r.word() as usize,
        };
        let (rows, base_position) = (r.word() as usize, r.word() as usize);
        let bounds = [
            ("layers", shape.layers, LAYERS_MAX),
            ("KV heads", shape.kv_heads, HEADS_MAX),
            ("head dimension", shape.head_dim, HEAD_DIM_MAX),
            ("rows", rows, ROWS_MAX),
        ];
        for (field, found, most) in bounds {
            // Their product is far from overflow.
            if found == 0 || found > most {
                let (expected, found) = (format!("1 to {most}"), found.to_string());
                return Err(FormatError::Field { field, expected, found });
            }
        }
        let token_checksum = r.word();
        field("reserved word", 0, u64::from(r.word()))?;
        let (kv_offset, stride, len) = (r.long(), r.long(), r.long());
        let mut sums = Reader { page: r.page, at: CHECKSUMS_AT };
        let extent_checksums = (0..shape.layers).map(|_| sums.word()).collect();
        let extent_bytes = extent_lengths(r.page, shape, encoding, rows)?;
        let this = Self {
            fingerprint,
            chunk_id,
            encoding,
            shape,
            rows,
            base_position,
            token_checksum,
            extent_checksums,
            extent_bytes,
        };
        field("KV offset", Self::kv_offset(rows) as u64, kv_offset)?;
        field("layer stride", this.layout().layer_stride() as u64, stride)?;
        field("file length", this.file_len() as u64, len)?;
        // Whatever this version does not define is zero.
        if this.encode()[..] != r.page[..PAGE_BYTES] {
            let (expected, found) = ("zero".to_owned(), "something else".to_owned());
            return Err(FormatError::Field { field: "reserved bytes", expected, found });
        }
        Ok(this)
    }
}

/// Stored bytes of each layer's extent.
fn extent_lengths(
    page: &[u8],
    shape: KvShape,
    encoding: Encoding,
    rows: usize,
) -> Result<Vec<u32>, FormatError> {
    let whole = KvLayout::new(shape, encoding.dtype, rows).layer_stride();
    if u32::try_from(whole).is_err() {
        let (expected, found) = ("below 4 GiB".to_owned(), whole.to_string());
        return Err(FormatError::Field { field: "layer stride", expected, found });
    }
    let mut lengths = Reader { page, at: LENGTHS_AT };
    let bytes: Vec<u32> = match encoding.codec {
        Codec::None => vec![whole as u32; shape.layers],
        _ => (0..shape.layers).map(|_| lengths.word()).collect(),
    };
    match bytes.iter().find(|b| **b == 0 || **b as usize > whole) {
        None => Ok(bytes),
        Some(wrong) => {
            let (expected, found) = (format!("1 to {whole}"), wrong.to_string());
            Err(FormatError::Field { field: "extent length", expected, found })
        }
    }
}

fn field(field: &'static str, expected: u64, found: u64) -> Result<(), FormatError> {
    if expected == found {
        return Ok(());
    }
    Err(FormatError::Field { field, expected: expected.to_string(), found: found.to_string() })
}

struct Reader<'a> {
    /// At least one page.
    page: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&self.page[self.at..self.at + N]);
        self.at += N;
        out
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}
