//! How much energy the machine has used, by whichever meter it has: RAPL through powercap, an
//! NVIDIA GPU's or a server's own sensor. RAPL counts joules; the others say watts, which are
//! summed up over time.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often watts are read: sensors do not change faster.
const PERIOD: Duration = Duration::from_secs(1);
const POWERCAP: &str = "/sys/class/powercap";

/// What measures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meter {
    /// Counters of microjoules, one a processor package.
    Rapl(Vec<PathBuf>),
    /// Watts of all GPUs.
    Nvidia,
    /// Watts of the server.
    Ipmi,
}

/// What a report says of it.
pub fn note(meter: &Result<Meter, String>) -> String {
    match meter {
        Ok(meter) => format!("energy: {}", meter.describe()),
        Err(why) => format!("energy: not available here: {why}"),
    }
}

/// A measurement under way.
pub struct Running {
    meter: Meter,
    before: Vec<u64>,
    sampler: Option<(Sender<()>, JoinHandle<f64>)>,
}

impl Meter {
    /// The first one that answers, or why none does.
    pub fn find() -> Result<Self, String> {
        let packages = packages(Path::new(POWERCAP));
        if packages.iter().any(|p| microjoules(p).is_some()) {
            return Ok(Self::Rapl(packages));
        }
        for meter in [Self::Nvidia, Self::Ipmi] {
            if meter.watts().is_some() {
                return Ok(meter);
            }
        }
        let rapl = match packages.first() {
            Some(package) => format!("{} cannot be read", package.display()),
            None => format!("{POWERCAP} has no package counter"),
        };
        Err(format!("{rapl}, and neither nvidia-smi nor ipmitool tells a power"))
    }

    /// For the report.
    pub fn describe(&self) -> String {
        match self {
            Self::Rapl(packages) => {
                format!("RAPL, {} packages, memory not included", packages.len())
            }
            Self::Nvidia => "GPU power by nvidia-smi, once a second".into(),
            Self::Ipmi => "server power by ipmitool, once a second".into(),
        }
    }

    /// Begins to count.
    pub fn start(&self) -> Running {
        let (mut before, mut sampler) = (Vec::new(), None);
        match self {
            Self::Rapl(packages) => before = counters(packages),
            _ => {
                let (stop, stopped) = channel();
                let meter = self.clone();
                let sample = move || {
                    let (mut joules, mut last) = (0.0, Instant::now());
                    loop {
                        let over = stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout);
                        // Asking takes time of its own, which is not the measured one's.
                        let now = Instant::now();
                        joules += meter.watts().unwrap_or(0.0) * (now - last).as_secs_f64();
                        last = now;
                        if over {
                            return joules;
                        }
                    }
                };
                sampler = Some((stop, std::thread::spawn(sample)));
            }
        }
        Running { meter: self.clone(), before, sampler }
    }

    fn watts(&self) -> Option<f64> {
        let run = |program: &str, args: &[&str]| {
            let out = Command::new(program).args(args).output().ok()?;
            out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
        };
        match self {
            Self::Rapl(_) => None,
            Self::Nvidia => {
                let args = ["--query-gpu=power.draw", "--format=csv,noheader,nounits"];
                sum_of_lines(&run("nvidia-smi", &args)?)
            }
            Self::Ipmi => ipmi_watts(&run("ipmitool", &["dcmi", "power", "reading"])?),
        }
    }
}

impl Running {
    /// Joules since it was started.
    pub fn stop(self) -> f64 {
        if let Some((stop, thread)) = self.sampler {
            let _ = stop.send(());
            return thread.join().unwrap_or(f64::NAN);
        }
        let Meter::Rapl(packages) = &self.meter else { return f64::NAN };
        let after = counters(packages);
        let used = packages.iter().zip(self.before.iter().zip(&after));
        used.map(|(p, (before, after))| difference(*before, *after, range(p)) as f64 / 1e6).sum()
    }
}

/// Counters begin again at their range.
fn difference(before: u64, after: u64, range: u64) -> u64 {
    if after >= before { after - before } else { after + (range - before) }
}

/// Packages, and not the cores and planes inside them, which are counted in them.
fn packages(powercap: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(powercap)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|p| {
            let name = p.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let label = std::fs::read_to_string(p.join("name")).unwrap_or_default();
            name.starts_with("intel-rapl:") && label.starts_with("package")
        })
        .collect();
    found.sort();
    found
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn microjoules(package: &Path) -> Option<u64> {
    number(&package.join("energy_uj"))
}

fn counters(packages: &[PathBuf]) -> Vec<u64> {
    packages.iter().map(|p| microjoules(p).unwrap_or(0)).collect()
}

fn range(package: &Path) -> u64 {
    number(&package.join("max_energy_range_uj")).unwrap_or(u64::from(u32::MAX))
}

fn sum_of_lines(text: &str) -> Option<f64> {
    let mut watts = text.lines().map(|l| l.trim().parse::<f64>());
    watts.try_fold(0.0, |sum, w| w.map(|w| sum + w)).ok().filter(|w| *w > 0.0)
}

fn ipmi_watts(text: &str) -> Option<f64> {
    let line = text.lines().find(|l| l.contains("Instantaneous power reading"))?;
    line.split(':').nth(1)?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meters_are_read_as_they_answer() {
        assert_eq!(sum_of_lines("71.30\n 68.70\n"), Some(140.0));
        assert_eq!(sum_of_lines("[N/A]\n"), None);
        assert_eq!(sum_of_lines(""), None);
        let text =
            "\n    Instantaneous power reading:                   214 Watts\n    Minimum …: 4";
        assert_eq!(ipmi_watts(text), Some(214.0));
        assert_eq!(ipmi_watts("DCMI request failed"), None);
        assert_eq!((difference(5, 9, 100), difference(95, 3, 100)), (4, 8));
    }

    #[test]
    fn packages_are_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let domains =
            [("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("dtpm", "package")];
        for (name, label) in domains {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("name"), format!("{label}\n")).unwrap();
            std::fs::write(path.join("energy_uj"), "2000000\n").unwrap();
            std::fs::write(path.join("max_energy_range_uj"), "9000000\n").unwrap();
        }
        let found = packages(dir.path());
        assert_eq!(found, [dir.path().join("intel-rapl:0")]);
        let running = Meter::Rapl(found.clone()).start();
        // It has begun again meanwhile.
        std::fs::write(found[0].join("energy_uj"), "500000\n").unwrap();
        assert_eq!(running.stop(), 7.5);
        assert!(packages(&dir.path().join("none")).is_empty());
    }
}
