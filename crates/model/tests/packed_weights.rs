//! Packed weights in files that processes share: the same bits, whatever happened to the file.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use common::Sequence;
use matkv_model::{LanguageModel, Phase, packed_files};
use matkv_testkit::TinyModel;
use matkv_types::{KvDtype, Precision};

/// A model file and a cache directory beside it.
struct Place {
    _dir: tempfile::TempDir,
    model: PathBuf,
    cache: PathBuf,
}

impl Place {
    fn new(matrices: GgmlDType) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (model, cache) = (dir.path().join("tiny.gguf"), dir.path().join("cache"));
        TinyModel { matrices, ..TinyModel::default() }.write(&model);
        Self { _dir: dir, model, cache }
    }

    fn open_as(&self, precision: Precision, phase: Phase) -> LanguageModel {
        LanguageModel::open_for(&self.model, Some(&self.cache), precision, phase).unwrap()
    }

    fn open(&self) -> LanguageModel {
        self.open_as(Precision::Bf16, Phase::Prefill)
    }

    /// Packed by this process, in its own memory.
    fn fresh(&self, precision: Precision, phase: Phase) -> Vec<u32> {
        let model = LanguageModel::open_for(&self.model, None, precision, phase).unwrap();
        logits(&model)
    }

    fn packed(&self) -> PathBuf {
        self.cache.join("packed")
    }

    fn names(&self) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.packed()).into_iter().flatten().flatten();
        entries.map(|e| e.file_name().into_string().unwrap()).collect()
    }

    fn files(&self) -> Vec<PathBuf> {
        let names = self.names().into_iter().filter(|n| n.ends_with(".weights"));
        names.map(|n| self.packed().join(n)).collect()
    }
}

/// Bits of the logits after a few tokens, and after one more.
fn logits(model: &LanguageModel) -> Vec<u32> {
    let mut sequence = Sequence::new(model, KvDtype::Bf16, 32);
    let mut all = sequence.compute(&[3, 40, 41, 200, 99]);
    all.extend(sequence.extend(&[17]));
    all.into_iter().map(f32::to_bits).collect()
}

/// Inodes of the files of a directory that this process has mapped, deleted ones too.
fn mapped(dir: &Path) -> Vec<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let dir = dir.to_str().unwrap();
    let ours = maps.lines().filter(|l| l.contains(dir));
    ours.map(|l| l.split_whitespace().nth(4).unwrap().parse().unwrap()).collect()
}

#[test]
fn mapped_weights_have_the_bits_of_packed_ones() {
    for matrices in [GgmlDType::F32, GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q8_0] {
        let place = Place::new(matrices);
        for precision in [Precision::Exact, Precision::Bf16] {
            for phase in [Phase::Prefill, Phase::Decode] {
                let wanted = place.fresh(precision, phase);
                for round in ["written", "found"] {
                    let model = place.open_as(precision, phase);
                    let case = format!("{matrices:?} {precision:?} {phase:?} {round}");
                    assert_eq!(mapped(&place.packed()).len(), 2, "{case}: layers and ends");
                    assert!(logits(&model) == wanted, "{case}");
                }
            }
        }
    }
}

#[test]
fn both_phases_share_what_both_need() {
    let place = Place::new(GgmlDType::Q4_1);
    let prefill = place.open();
    assert_eq!(place.files().len(), 2);
    let decode = place.open_as(Precision::Bf16, Phase::Decode);
    assert_eq!(place.files().len(), 3, "embedding and head are the same file");
    let mut inodes = mapped(&place.packed());
    inodes.sort_unstable();
    inodes.dedup();
    assert_eq!((inodes.len(), mapped(&place.packed()).len()), (3, 4));
    assert!(prefill.weight_bytes() > decode.weight_bytes());
    let found = packed_files(&place.cache);
    assert_eq!((found.dir, found.files), (place.packed(), 3));
    assert!(found.bytes > prefill.weight_bytes() as u64);
    // Dense weights serve both phases.
    let place = Place::new(GgmlDType::F32);
    let (_a, _b) = (place.open(), place.open_as(Precision::Bf16, Phase::Decode));
    assert_eq!(place.files().len(), 2);
}

#[test]
fn an_opened_file_is_found_not_written() {
    let place = Place::new(GgmlDType::Q4_1);
    place.open();
    let times = |place: &Place| -> Vec<_> {
        place.files().iter().map(|f| (f.metadata().unwrap().ino(), f.clone())).collect()
    };
    let before = times(&place);
    place.open();
    assert_eq!(times(&place), before);
}

#[test]
fn a_damaged_file_is_written_again() {
    let place = Place::new(GgmlDType::Q4_1);
    let wanted = logits(&place.open());
    for file in place.files() {
        let good = std::fs::read(&file).unwrap();
        let other = place.files().into_iter().find(|f| *f != file).unwrap();
        let flipped = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            bytes
        };
        let cases = [
            ("magic", flipped(0)),
            ("section offset", flipped(112)),
            ("checksum", flipped(104)),
            ("first section", flipped(4096)),
            ("middle", flipped(4096 + 1)),
            ("short", good[..good.len() - 4096].to_vec()),
            ("long", [&good[..], &[0; 4096]].concat()),
            ("header only", good[..4096].to_vec()),
            ("a few bytes", good[..50].to_vec()),
            ("empty", Vec::new()),
            ("of other weights", std::fs::read(other).unwrap()),
        ];
        for (name, bytes) in cases {
            std::fs::remove_file(&file).unwrap();
            std::fs::write(&file, &bytes).unwrap();
            let model = place.open();
            assert!(logits(&model) == wanted, "{name}");
            assert!(std::fs::read(&file).unwrap() == good, "{name}: the file is as before");
            assert_eq!(mapped(&place.packed()).len(), 2, "{name}");
        }
    }
}

#[test]
fn every_section_is_verified() {
    let place = Place::new(GgmlDType::Q8_0);
    place.open();
    for file in place.files() {
        let good = std::fs::read(&file).unwrap();
        let number = |at: usize| u64::from_le_bytes(good[at..at + 8].try_into().unwrap()) as usize;
        let count = u32::from_le_bytes(good[12..16].try_into().unwrap()) as usize;
        for entry in (0..count).map(|i| 112 + 24 * i) {
            let mut bytes = good.clone();
            bytes[number(entry) + number(entry + 8) - 1] ^= 1;
            std::fs::remove_file(&file).unwrap();
            std::fs::write(&file, &bytes).unwrap();
            place.open();
            assert!(std::fs::read(&file).unwrap() == good, "section at {entry}");
        }
    }
}

#[test]
fn many_openers_map_one_file() {
    let place = Place::new(GgmlDType::Q4_1);
    let wanted = place.fresh(Precision::Bf16, Phase::Prefill);
    let models: Vec<LanguageModel> = std::thread::scope(|scope| {
        let openers: Vec<_> = (0..6).map(|_| scope.spawn(|| place.open())).collect();
        openers.into_iter().map(|o| o.join().unwrap()).collect()
    });
    let inodes: BTreeSet<u64> = mapped(&place.packed()).into_iter().collect();
    let files: BTreeSet<u64> = place.files().iter().map(|f| f.metadata().unwrap().ino()).collect();
    assert_eq!(inodes, files, "nobody has a copy of its own");
    assert_eq!(mapped(&place.packed()).len(), 12);
    assert!(!place.names().iter().any(|n| n.ends_with(".tmp")));
    models.iter().for_each(|m| assert!(logits(m) == wanted));
}

#[test]
fn what_a_killed_writer_left_is_replaced() {
    let place = Place::new(GgmlDType::Q4_1);
    place.open();
    let files = place.files();
    let good: Vec<_> = files.iter().map(|f| std::fs::read(f).unwrap()).collect();
    for (file, good) in files.iter().zip(&good) {
        std::fs::rename(file, file.with_extension("tmp")).unwrap();
        std::fs::write(file.with_extension("tmp"), &good[..good.len() / 2]).unwrap();
    }
    place.open();
    for (file, good) in files.iter().zip(&good) {
        assert!(std::fs::read(file).unwrap() == *good);
    }
    assert!(!place.names().iter().any(|n| n.ends_with(".tmp")));
}

#[test]
fn without_a_directory_weights_stay_private() {
    let place = Place::new(GgmlDType::Q4_1);
    let wanted = place.fresh(Precision::Bf16, Phase::Prefill);
    std::fs::create_dir_all(&place.cache).unwrap();
    std::fs::write(place.packed(), "a file where the directory should be").unwrap();
    let model = place.open();
    assert!(logits(&model) == wanted && mapped(&place.packed()).is_empty());
}

#[test]
fn a_file_that_cannot_be_written_leaves_weights_private() {
    let place = Place::new(GgmlDType::Q4_1);
    let wanted = logits(&place.open());
    for file in place.files() {
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir_all(file.with_extension("tmp").join("in the way")).unwrap();
    }
    let model = place.open();
    assert!(logits(&model) == wanted && mapped(&place.packed()).is_empty());
    assert!(place.files().is_empty(), "no partial file is visible");
}

#[test]
fn files_of_models_that_are_gone_are_removed() {
    let place = Place::new(GgmlDType::Q4_1);
    place.open();
    let old = place.files();
    let second = place.model.with_file_name("second.gguf");
    TinyModel { seed: 2, ..TinyModel::default() }.write(&second);
    let open = |path: &Path| LanguageModel::open(path, Some(&place.cache)).unwrap();
    open(&second);
    assert!(old.iter().all(|f| f.exists()), "both model files are there");
    let of_second = place.files().into_iter().filter(|f| !old.contains(f)).collect::<Vec<_>>();
    // Another model under the old name.
    TinyModel { seed: 3, ..TinyModel::default() }.write(&place.model);
    open(&place.model);
    assert!(!old.iter().any(|f| f.exists()), "the old file's weights");
    assert!(of_second.iter().all(|f| f.exists()));
    std::fs::remove_file(&second).unwrap();
    std::fs::write(place.packed().join("0123.weights"), "of no version").unwrap();
    TinyModel { seed: 4, ..TinyModel::default() }.write(&place.model);
    open(&place.model);
    assert!(!of_second.iter().any(|f| f.exists()), "the second file is gone");
    assert_eq!(place.files().len(), 2);
}
