//! From flags, environment, file and preset to values with an origin each.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::config::{Config, StorageType};
use crate::error::ConfigError;
use crate::settings::{SETTINGS, Setting};

const PRESETS: [(&str, &str); 2] = [
    ("small", include_str!("../../../configs/small.toml")),
    ("large", include_str!("../../../configs/large.toml")),
];

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built in.
    Default,
    /// A preset by name.
    Preset(String),
    /// The configuration file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// The command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Preset(name) => write!(f, "preset {name}"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Flag => f.write_str("command line"),
        }
    }
}

/// What is given besides the defaults.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Name of a preset.
    pub preset: Option<String>,
    /// A TOML file.
    pub file: Option<PathBuf>,
    /// `MATKV_*` variables.
    pub environment: BTreeMap<String, String>,
    /// `key=value` from the command line.
    pub flags: Vec<(String, String)>,
}

/// Values and where each came from.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The values.
    pub config: Config,
    file: Option<PathBuf>,
    origins: BTreeMap<&'static str, Origin>,
}

/// Variables that steer the programs themselves and are no settings.
const OTHER_VARIABLES: [&str; 13] = [
    "MATKV_PYTHON",
    "MATKV_ISA",
    "MATKV_CRASH_FILE",
    "MATKV_REQUIRE_S3",
    "MATKV_CEPH_STORE",
    "MATKV_CEPH_GIB",
    "MATKV_S3_PORT",
    "MATKV_TOOLS_DIR",
    "MATKV_FAULT_FILE",
    "MATKV_CONFIG",
    "MATKV_PRESET",
    "MATKV_REQUIRE_MODELS",
    "MATKV_CACHE_DIR",
];

impl Sources {
    /// With the process's environment.
    pub fn from_environment() -> Self {
        let ours = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            let name = name.into_string().ok().filter(|n| n.starts_with("MATKV_"))?;
            Some((name, value.to_string_lossy().into_owned()))
        };
        let environment = std::env::vars_os().filter_map(ours).collect();
        Self { environment, ..Self::default() }
    }

    /// Applies everything in order of precedence.
    ///
    /// # Errors
    /// The first key or value that is wrong, with its place.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        let (config, file) = (Config::default(), self.file.clone());
        let mut resolved = Resolved { config, file, origins: BTreeMap::new() };
        let mut preset = self.preset.clone();
        let mut file_values = Vec::new();
        if let Some(path) = &self.file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: path.clone(), source })?;
            let (named, values) = flatten(&text, path)?;
            preset = preset.or(named);
            file_values = values;
        }
        if let Some(name) = preset {
            resolved.apply_preset(&name)?;
        }
        let file = Origin::File(self.file.clone().unwrap_or_default());
        for (key, value) in file_values {
            resolved.set(&key, &value, file.clone())?;
        }
        for (variable, value) in &self.environment {
            resolved.set_variable(variable, value)?;
        }
        for (key, value) in &self.flags {
            resolved.set(key, value, Origin::Flag)?;
        }
        if resolved.config.chunk_overlap >= resolved.config.chunk_size {
            return Err(ConfigError::Value {
                key: "chunker.chunk_overlap".into(),
                value: resolved.config.chunk_overlap.to_string(),
                origin: resolved.origin("chunker.chunk_overlap").to_string(),
                reason: format!(
                    "must be smaller than chunker.chunk_size ({})",
                    resolved.config.chunk_size
                ),
            });
        }
        resolved.check_storage()?;
        Ok(resolved)
    }
}

impl Resolved {
    /// Values that must fit each other.
    fn check_storage(&self) -> Result<(), ConfigError> {
        let c = &self.config;
        let wrong = |key: &str, value: String, reason: &str| ConfigError::Value {
            key: key.into(),
            value,
            origin: self.origin(key).to_string(),
            reason: reason.into(),
        };
        let count = c.storage_dirs.len();
        let (fits, needs) = match c.storage_type {
            StorageType::Single => (count <= 1, "single uses one directory"),
            StorageType::Stripe => (count >= 2, "stripe needs two directories or more"),
            StorageType::Mirror => (
                count >= 2 && count.is_multiple_of(2),
                "mirror needs an even number of directories",
            ),
        };
        if !fits {
            return Err(wrong("storage.dirs", format!("{count} directories"), needs));
        }
        if c.low_watermark > c.high_watermark {
            let (key, value) = ("storage.low_watermark", c.low_watermark.to_string());
            return Err(wrong(key, value, "must not be above storage.high_watermark"));
        }
        Ok(())
    }

    /// The configuration file that is in use.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Where a key's value came from.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// Every key with value, origin and meaning.
    pub fn rows(&self) -> impl Iterator<Item = (&'static Setting, String, Origin)> + '_ {
        SETTINGS.iter().map(|s| (s, (s.get)(&self.config), self.origin(s.key)))
    }

    /// The values as a TOML file that resolves to the same configuration.
    pub fn to_toml(&self) -> String {
        let mut sections: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for setting in SETTINGS {
            let (section, name) = setting.key.split_once('.').unwrap_or(("", setting.key));
            let value = toml::Value::String((setting.get)(&self.config));
            sections.entry(section).or_default().push(format!("{name} = {value}"));
        }
        let section =
            |(name, lines): (&str, Vec<String>)| format!("[{name}]\n{}\n", lines.join("\n"));
        sections.into_iter().map(section).collect::<Vec<_>>().join("\n")
    }

    /// Sets a key from the command line, after everything else.
    ///
    /// # Errors
    /// If the key or the value is wrong.
    pub fn override_with(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        self.set(key, value, Origin::Flag)
    }

    fn apply_preset(&mut self, name: &str) -> Result<(), ConfigError> {
        let names = PRESETS.map(|p| p.0);
        let found = PRESETS.iter().find(|p| p.0 == name);
        let (_, text) = found.ok_or_else(|| ConfigError::UnknownKey {
            key: name.to_owned(),
            origin: "the list of presets".into(),
            hint: format!(": there are {}", names.join(" and ")),
        })?;
        let (_, values) = flatten(text, Path::new(name))?;
        for (key, value) in values {
            self.set(&key, &value, Origin::Preset(name.to_owned()))?;
        }
        Ok(())
    }

    fn set_variable(&mut self, variable: &str, value: &str) -> Result<(), ConfigError> {
        if OTHER_VARIABLES.contains(&variable) {
            return Ok(());
        }
        let setting = SETTINGS.iter().find(|s| s.variable() == variable);
        let setting = setting.ok_or_else(|| {
            let names: Vec<String> = SETTINGS.iter().map(Setting::variable).collect();
            ConfigError::UnknownKey {
                key: variable.to_owned(),
                origin: "the environment".into(),
                hint: nearest(variable, names.iter().map(String::as_str)),
            }
        })?;
        self.set(setting.key, value, Origin::Environment(variable.to_owned()))
    }

    fn set(&mut self, key: &str, value: &str, origin: Origin) -> Result<(), ConfigError> {
        let setting =
            SETTINGS.iter().find(|s| s.key == key).ok_or_else(|| ConfigError::UnknownKey {
                key: key.to_owned(),
                origin: origin.to_string(),
                hint: nearest(key, SETTINGS.iter().map(|s| s.key)),
            })?;
        (setting.set)(&mut self.config, value).map_err(|reason| ConfigError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            origin: origin.to_string(),
            reason,
        })?;
        self.origins.insert(setting.key, origin);
        Ok(())
    }
}

fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> String {
    // The last part counts most: a right name in a wrong section is the usual slip.
    let last = |k: &str| k.rsplit('.').next().unwrap_or(k).to_owned();
    let score = |k: &str| {
        strsim::jaro_winkler(key, k).max(strsim::jaro_winkler(&last(key), &last(k)) - 0.01)
    };
    let best = known.max_by(|a, b| score(a).total_cmp(&score(b)));
    best.map(|k| format!("; did you mean {k:?}?")).unwrap_or_default()
}

type Flat = (Option<String>, Vec<(String, String)>);

/// Top-level `preset`, and every other value as `section.name` and text.
fn flatten(text: &str, path: &Path) -> Result<Flat, ConfigError> {
    let err = |reason: String| ConfigError::Syntax { path: path.to_owned(), reason };
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| err(e.to_string()))?;
    let mut preset = None;
    let mut values = Vec::new();
    for (section, value) in table {
        match value {
            toml::Value::String(name) if section == "preset" => preset = Some(name),
            toml::Value::Table(entries) => {
                for (name, value) in entries {
                    values.push((format!("{section}.{name}"), plain(value).map_err(&err)?));
                }
            }
            other => values.push((section, plain(other).map_err(&err)?)),
        }
    }
    Ok((preset, values))
}

fn plain(value: toml::Value) -> Result<String, String> {
    match value {
        toml::Value::String(s) => Ok(s),
        toml::Value::Integer(n) => Ok(n.to_string()),
        toml::Value::Float(x) => Ok(x.to_string()),
        toml::Value::Boolean(b) => Ok(b.to_string()),
        toml::Value::Array(list) if list.iter().all(toml::Value::is_str) => {
            Ok(list.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(","))
        }
        other => Err(format!("expected a text, number or flag, found {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(file: &str) -> (tempfile::TempDir, Sources) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("matkv.toml");
        std::fs::write(&path, file).unwrap();
        (dir, Sources { file: Some(path), ..Sources::default() })
    }

    #[test]
    fn precedence_and_origin() {
        let (_dir, mut s) = sources("preset = \"large\"\n[chunker]\nchunk_size = 300\n");
        s.environment.insert("MATKV_RETRIEVAL_TOP_K".into(), "7".into());
        s.environment.insert("MATKV_CHUNKER_CHUNK_SIZE".into(), "400".into());
        s.flags.push(("chunker.chunk_size".into(), "500".into()));
        let r = s.resolve().unwrap();
        assert_eq!((r.config.chunk_size, r.config.top_k, r.config.batch_size), (500, 7, 4));
        assert_eq!(r.origin("chunker.chunk_size"), Origin::Flag);
        assert_eq!(r.origin("pipeline.batch_size"), Origin::Preset("large".into()));
        assert_eq!(r.origin("log.level"), Origin::Default);
        let (_dir, again) = sources(&r.to_toml());
        assert_eq!(again.resolve().unwrap().config, r.config);
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        for (file, nearest) in [
            ("[chunker]\nchunk_sise = 1\n", "chunker.chunk_size"),
            ("[chunks]\nchunk_size = 1\n", "chunker.chunk_size"),
            ("top_k = 3\n", "retrieval.top_k"),
        ] {
            let (_dir, s) = sources(file);
            let text = s.resolve().unwrap_err().to_string();
            assert!(text.contains(nearest) && text.contains("matkv.toml"), "{text}");
        }
        let mut s = Sources::default();
        s.environment.insert("MATKV_ARENA_SICE".into(), "1".into());
        assert!(s.resolve().unwrap_err().to_string().contains("MATKV_ARENA_SIZE"));
    }

    #[test]
    fn wrong_values_say_what_and_where() {
        for (file, part) in [
            ("[retrieval]\ntop_k = 0\n", "between 1 and 1024"),
            ("[arena]\nsize = \"big\"\n", "not a size"),
            ("[server]\ntcp = \"0.0.0.0:80\"\n", "loopback"),
            ("[chunker]\nchunk_size = 8\nchunk_overlap = 8\n", "smaller than"),
            ("[chunker\n", "TOML"),
            ("[chunker]\nchunk_size = [1]\n", "expected a text"),
            ("[storage]\ntype = \"stripe\"\ndirs = [\"/a\"]\n", "two directories"),
            ("[storage]\ndtype = \"int7\"\n", "int8"),
            ("[storage]\nhigh_watermark = 0.5\n", "low_watermark"),
            ("[cold]\nurl = \"ftp://x\"\n", "s3://"),
        ] {
            let (_dir, s) = sources(file);
            let text = s.resolve().unwrap_err().to_string();
            assert!(text.contains(part), "{file}: {text}");
        }
        let s = Sources { preset: Some("medium".into()), ..Sources::default() };
        assert!(s.resolve().unwrap_err().to_string().contains("small and large"));
    }

    /// The committed example names every key, with its default.
    #[test]
    fn the_example_is_complete() {
        let text = include_str!("../../../configs/matkv.example.toml");
        let (_, values) = flatten(text, Path::new("example")).unwrap();
        let keys: Vec<&str> = values.iter().map(|v| v.0.as_str()).collect();
        let home = ["paths.cache_dir", "paths.store_dir", "paths.runtime_dir"];
        for setting in SETTINGS.iter().filter(|s| !home.contains(&s.key)) {
            assert!(keys.contains(&setting.key), "{} is not in the example", setting.key);
            let shown = &values.iter().find(|v| v.0 == setting.key).unwrap().1;
            let mut c = Config::default();
            (setting.set)(&mut c, shown).unwrap();
            assert_eq!(c, Config::default(), "{}", setting.key);
        }
    }
}
