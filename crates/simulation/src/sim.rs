//! The simulation: a clock, a queue of events, and what must hold after each of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crossbeam::channel::{Receiver, bounded};
use matkv_decoder_core::{Batch, Limits, Turn};
use matkv_loader_core::machine::{
    ChunkSource, ChunkUse, CompileJob, Compiled, Keeping, Leased, LoadMessage, Materialize,
    Materialized, NearChunk, Planned, RequestError, RequestState, Resident, hand_over,
};
use matkv_types::{FinishReason, Mode, Sampling};

use crate::chunks::{self, Chunk, Question, spec};
use crate::client::Client;
use crate::engine::{END, HashEngine};
use crate::loader::Loader;
use crate::random::Random;
use crate::world::{Effect, Faults, SimWorld};

/// What has happened under a seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests, and how they ended.
    pub requests: u64,
    /// Whole answers, all of them right.
    pub answered: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Requests that were told why there is no answer.
    pub refused: u64,
    /// Chunks materialized.
    pub materialized: u64,
    /// Rows that earlier prompts had computed.
    pub earlier: u64,
    /// Files found damaged.
    pub quarantined: u64,
    /// Deaths of the decoder and of the loader.
    pub deaths: u64,
    /// Events.
    pub events: u64,
}

/// Events a run may take: more is a livelock.
const EVENTS_MAX: u64 = 200_000;
/// Requests admitted at a time, as in the gateway.
const ADMITTED_MAX: usize = 12;
/// Time between two token boundaries, at most.
const TURN_MAX: u64 = 3;

enum Event {
    Ask(usize),
    Leave(usize),
    Ingest(usize),
    Forget(usize),
    Effect(Effect),
    Turn,
    DecoderDies,
    DecoderJoins,
    LoaderDies,
}

struct Sim<'e> {
    random: Random,
    faults: Faults,
    chunks: Vec<Chunk>,
    clients: Vec<Client>,
    ingests: VecDeque<(usize, Receiver<Result<Materialized, String>>)>,
    arena_bytes: usize,
    limits: Limits,
    loader: Loader,
    decoder: Option<Batch<'e, HashEngine>>,
    now: u64,
    order: u64,
    queue: BTreeMap<(u64, u64), Event>,
    report: Report,
}

/// Runs a seed.
///
/// # Errors
/// What did not hold, and when. A panic of the code under test is one too; it is left to the
/// caller to catch.
pub fn run(seed: u64) -> Result<Report, String> {
    let mut sim = Sim::new(seed)?;
    while let Some((at, event)) = sim.queue.pop_first() {
        sim.now = at.0;
        sim.loader.load.world().now = at.0;
        sim.report.events += 1;
        if sim.report.events > EVENTS_MAX {
            return Err(format!("seed {seed}: no end after {EVENTS_MAX} events"));
        }
        let name = event.name();
        sim.happen(event)
            .and_then(|()| sim.settle())
            .map_err(|e| format!("seed {seed}, time {}, after {name}: {e}", sim.now))?;
    }
    sim.at_rest().map_err(|e| format!("seed {seed}, at the end: {e}"))?;
    Ok(sim.report)
}

impl Event {
    fn name(&self) -> &'static str {
        match self {
            Self::Ask(_) => "a request",
            Self::Leave(_) => "a client leaving",
            Self::Ingest(_) => "an ingest",
            Self::Forget(_) => "a deletion",
            Self::Effect(Effect::Load(..)) => "a load",
            Self::Effect(Effect::Compile { .. }) => "a computation",
            Self::Effect(Effect::Prefill(_)) => "a prefill",
            Self::Turn => "a token boundary",
            Self::DecoderDies => "the decoder's death",
            Self::DecoderJoins => "a decoder joining",
            Self::LoaderDies => "the loader's death",
        }
    }
}

impl Sim<'static> {
    fn new(seed: u64) -> Result<Self, String> {
        let mut random = Random::new(seed);
        let faults = faults(&mut random);
        let chunks: Vec<Chunk> = (0..random.between(2, 7))
            .map(|n| Chunk::new(n, &mut random))
            .collect::<Result<_, _>>()?;
        let limits = Limits {
            sequences: random.between(1, 6) as usize,
            rows: random.between(20, 400) as usize,
        };
        let arena_bytes = (random.between(12, 80) * 8192) as usize;
        let disk = chunks.iter().filter(|_| random.chance(800)).map(|c| (c.id, c.file.clone()));
        let disk = disk.collect();
        let world = SimWorld::new(disk, faults, Random::new(seed ^ 0x5eed));
        let loader = Loader::start(arena_bytes, world)?;
        let mut sim = Self {
            random,
            faults,
            chunks,
            clients: Vec::new(),
            ingests: VecDeque::new(),
            arena_bytes,
            limits,
            loader,
            decoder: None,
            now: 0,
            order: 0,
            queue: BTreeMap::new(),
            report: Report::default(),
        };
        sim.script();
        Ok(sim)
    }

    /// What clients will do.
    fn script(&mut self) {
        self.at(0, Event::DecoderJoins);
        self.at(1, Event::Turn);
        let count = self.random.between(3, 16) as usize;
        let span = self.random.between(1, 400);
        for n in 0..count {
            let question = self.question();
            let expected = question.answer(&self.chunks);
            self.clients.push(Client { question, expected, state: None, left: false });
            let time = self.random.below(span);
            self.at(time, Event::Ask(n));
            if self.random.chance(self.faults.cancel) {
                let later = time + self.random.below(100);
                self.at(later, Event::Leave(n));
            }
        }
        for _ in 0..self.random.below(6) {
            let (time, chunk) = (self.random.below(span), self.random.below(100) as usize);
            let event =
                if self.random.chance(700) { Event::Ingest(chunk) } else { Event::Forget(chunk) };
            self.at(time, event);
        }
        for _ in 0..3 {
            if self.random.chance(self.faults.decoder) {
                let time = self.random.below(2 * span);
                self.at(time, Event::DecoderDies);
            }
        }
        if self.random.chance(self.faults.loader) {
            let time = self.random.below(2 * span);
            self.at(time, Event::LoaderDies);
        }
    }

    fn question(&mut self) -> Question {
        let count = self.random.below(4) as usize;
        let mut chosen: Vec<usize> = Vec::new();
        for _ in 0..count {
            let n = self.random.below(self.chunks.len() as u64) as usize;
            if !chosen.contains(&n) {
                chosen.push(n);
            }
        }
        let mode = chunks::mode(&mut self.random);
        // Now and then a conversation goes on.
        let (chosen, mode) = match self.clients.last() {
            Some(Client { question: q, .. }) if self.random.chance(400) => {
                (q.chunks.clone(), q.mode)
            }
            _ => (chosen, mode),
        };
        let rest = (0..self.random.between(1, 12)).map(|i| 40 + i as u32).collect();
        // Now and then a slot that needs a large hole.
        let most = if self.random.chance(200) { 400 } else { 24 };
        let sampling = Sampling {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
            max_new_tokens: self.random.between(1, most) as u32,
            stop: Vec::new(),
        };
        Question { chunks: chosen, mode, rest, sampling }
    }

    fn at(&mut self, time: u64, event: Event) {
        self.order += 1;
        self.queue.insert((time, self.order), event);
    }

    fn after(&mut self, time: u64, event: Event) {
        self.at(self.now + time, event);
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Ask(n) => self.ask(n),
            Event::Leave(n) => {
                self.clients[n].left = true;
                if let Some(state) = &self.clients[n].state {
                    state.cancel();
                }
            }
            Event::Ingest(n) => self.ingest(n % self.chunks.len()),
            Event::Forget(n) => {
                let id = self.chunks[n % self.chunks.len()].id;
                self.loader.load.message(LoadMessage::Forget(vec![id]));
            }
            Event::Effect(Effect::Load(done, growing)) => {
                if let (Err(_), Some(growing)) = (&done.result, growing) {
                    growing.fail();
                }
                self.loader.load.loaded(*done);
            }
            Event::Effect(Effect::Compile { job, background }) => self.compiled(job, background),
            Event::Effect(Effect::Prefill(resident)) => self.prefilled(*resident)?,
            Event::Turn => self.turn()?,
            Event::DecoderDies => self.decoder_dies(),
            Event::DecoderJoins => {
                if self.decoder.is_none() {
                    self.decoder = Some(self.loader.begin(self.limits)?);
                }
            }
            Event::LoaderDies => self.loader_dies()?,
        }
        Ok(())
    }

    /// Everything that follows at once, and what must hold then.
    fn settle(&mut self) -> Result<(), String> {
        let Loader { load, sessions, kept, epoch, completions, .. } = &mut self.loader;
        // The completion thread is late now and then: tokens coalesce, and the ring fills.
        if let Some(completions) = completions
            && self.random.chance(400)
        {
            sessions.drain(*epoch, completions).map_err(|e| e.to_string())?;
        }
        // And so may be the load thread.
        if self.random.chance(800) {
            kept.try_iter().for_each(|message| load.message(message));
        }
        load.pump();
        load.check()?;
        self.loader.sessions.check()?;
        let effects = std::mem::take(&mut self.loader.load.world().effects);
        for (time, effect) in effects {
            self.after(time, Event::Effect(effect));
        }
        self.collect_ingests()?;
        self.clients.iter().try_for_each(Client::check)
    }

    fn ask(&mut self, n: usize) {
        self.report.requests += 1;
        let running = |c: &&Client| c.state.as_ref().is_some_and(|s| s.look(|p| p.ended.is_none()));
        let admitted = self.clients.iter().filter(running).count();
        let client = &mut self.clients[n];
        let state = RequestState::new();
        client.state = Some(Arc::clone(&state));
        if client.left {
            state.cancel();
        }
        if admitted >= ADMITTED_MAX {
            return state.end(Err(RequestError::Exhausted("queue".into())));
        }
        let question = client.question.clone();
        let vanilla = question.mode == Mode::Vanilla;
        let source = if vanilla { ChunkSource::Vanilla } else { ChunkSource::Flash };
        let chunk = |&i: &usize| ChunkUse {
            id: self.chunks[i].id,
            document: String::new(),
            ordinal: 0,
            tokens: Arc::clone(&self.chunks[i].tokens),
            score: 0.0,
            source,
        };
        let mut near = Vec::new();
        while self.random.chance(500) {
            let chunk = &self.chunks[self.random.below(self.chunks.len() as u64) as usize];
            near.push(NearChunk { id: chunk.id, tokens: Arc::clone(&chunk.tokens) });
        }
        let planned = Planned {
            state,
            chunks: question.chunks.iter().map(chunk).collect(),
            dropped: Vec::new(),
            mode: question.mode,
            plan: question.plan(&self.chunks),
            sampling: question.sampling,
            return_logits: false,
            cold: self.random.chance(200),
            recompute: self.random.chance(20),
            near,
            urgent: self.random.chance(50),
            earlier: self.random.chance(800),
        };
        self.loader.load.message(LoadMessage::Request(Box::new(planned)));
    }

    fn ingest(&mut self, n: usize) {
        let (sender, receiver) = bounded(1);
        let (id, tokens) = (self.chunks[n].id, Arc::clone(&self.chunks[n].tokens));
        let job = Materialize { id, tokens, reply: sender };
        self.loader.load.message(LoadMessage::Materialize(job));
        self.ingests.push_back((n, receiver));
    }

    /// Chunks of ingests that are there: they go to the device, as the ingest thread does it.
    fn collect_ingests(&mut self) -> Result<(), String> {
        // In order, as the ingest thread takes them: what is ready behind one that is not keeps its
        // memory.
        while let Some((n, reply)) = self.ingests.front() {
            let n = *n;
            let outcome = reply.try_recv();
            if matches!(outcome, Err(crossbeam::channel::TryRecvError::Empty)) {
                break;
            }
            self.ingests.pop_front();
            match outcome {
                Ok(Ok(materialized)) => {
                    let chunk = &self.chunks[n];
                    if materialized.file() != chunk.file {
                        return Err(format!("chunk {n} was materialized with other bytes"));
                    }
                    self.loader.load.world().write(chunk.id, materialized.file());
                    self.report.materialized += 1;
                }
                Ok(Err(_)) if self.faults.compute > 0 => {}
                Ok(Err(e)) if e.contains("arena") => {}
                Ok(Err(e)) => return Err(format!("chunk {n} was refused: {e}")),
                Err(_) => return Err(format!("an ingest was not told about chunk {n}")),
            }
        }
        Ok(())
    }

    fn compiled(&mut self, mut job: CompileJob, background: bool) {
        let world = self.loader.load.world();
        world.background -= usize::from(background);
        let (id, for_request, store) = (job.id, job.for_request, job.store);
        let outcome = if world.random.chance(world.faults.compute) {
            Err("the computation failed".to_owned())
        } else {
            chunks::compute(&mut job.filling.slot, id, &job.tokens)
                .map(|file| job.filling.freeze_chunk(id, &file))
        };
        let (image, compute_ms) = (None, 5);
        let compiled = Compiled { id, for_request, store, image, compute_ms, outcome };
        self.loader.load.compiled(compiled);
    }

    /// What the compute thread does with a request, with the engine of hashes.
    fn prefilled(&mut self, mut resident: Resident) -> Result<(), String> {
        let there = resident.settle();
        let coming = |c: &Leased| matches!(c, Leased::Coming(c) if c.growing().has_failed());
        let again = resident.chunks.iter().any(coming);
        let state = Arc::clone(&resident.planned.state);
        if !there && !again && !state.is_cancelled() {
            // It waits for a layer.
            let effects = &mut self.loader.load.world().effects;
            effects.push((1, Effect::Prefill(Box::new(resident))));
            return Ok(());
        }
        self.loader.load.world().prefills -= 1;
        if again && !state.is_cancelled() {
            self.loader.load.message(LoadMessage::Again(Box::new(resident)));
            return Ok(());
        }
        if state.is_cancelled() {
            drop(resident);
            state.end(Ok(FinishReason::Cancelled));
            return Ok(());
        }
        chunks::choose(&mut resident.planned);
        let mut own = resident.own_rows().map_err(|e| e.to_string())?;
        let own_layout = spec().own_layout(resident.planned.plan.own_rows);
        let done = resident.take_earlier(&mut own, own_layout);
        self.report.earlier += done as u64;
        let planned = &resident.planned;
        let first = {
            let prefix = (self.loader.prefix.section(), self.loader.prefix.layout());
            let chunk = |i: usize| match &resident.chunks[i] {
                Leased::Here(lease) => (lease.chunk().section(), lease.chunk().layout()),
                Leased::Coming(_) => unreachable!("all chunks are there"),
            };
            let segments = chunks::segments(&planned.plan, prefix, chunk);
            chunks::prefill(&planned.plan, &planned.sampling, &segments, &mut own, done)
        };
        drop(own);
        let keeping = Keeping::of(planned, &spec());
        let Loader { prefix, sessions, .. } = &self.loader;
        if first != END {
            state.update(|p| p.tokens.push(first));
        }
        if first == END || planned.sampling.max_new_tokens == 1 {
            sessions.keep(keeping, resident.own);
            let reason = if first == END { FinishReason::Stop } else { FinishReason::Length };
            state.end(Ok(reason));
            return Ok(());
        }
        if let Err(e) = hand_over(prefix, sessions, resident, first, keeping) {
            state.end(Err(e));
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), String> {
        if let Some(batch) = &mut self.decoder {
            let turn = batch.turn(&mut || true).map_err(|e| e.to_string())?;
            batch.check()?;
            if turn == Turn::Stopped {
                return Err("the decoder stopped by itself".into());
            }
        }
        // As long as anything can still happen, boundaries come.
        let open = |c: &Client| c.state.as_ref().is_none_or(|s| s.look(|p| p.ended.is_none()));
        if !self.queue.is_empty() || self.clients.iter().any(open) || !self.ingests.is_empty() {
            let time = self.random.between(1, TURN_MAX);
            self.after(time, Event::Turn);
        }
        Ok(())
    }

    fn decoder_dies(&mut self) {
        if self.decoder.take().is_none() {
            return;
        }
        self.report.deaths += 1;
        // Its death has been confirmed; what it posted before is taken first.
        let Loader { sessions, epoch, completions, .. } = &mut self.loader;
        if let Some(mut completions) = completions.take() {
            let _ = sessions.drain(*epoch, &mut completions);
        }
        sessions.end("the decoder died");
        let time = self.random.between(1, 50);
        self.after(time, Event::DecoderJoins);
    }

    /// Nothing of the loader survives but the device; its clients' connections break.
    fn loader_dies(&mut self) -> Result<(), String> {
        self.report.deaths += 1;
        self.decoder = None;
        self.queue.retain(|_, e| !matches!(e, Event::Effect(_)));
        self.ingests.clear();
        for client in &self.clients {
            if let Some(state) = &client.state {
                state.end(Err(RequestError::Unavailable("the connection broke".into())));
            }
        }
        let world = self.loader.load.world();
        self.report.quarantined += world.quarantined;
        let (disk, seed) = (std::mem::take(&mut world.disk), world.random.next());
        let world = SimWorld::new(disk, self.faults, Random::new(seed));
        self.loader = Loader::start(self.arena_bytes, world)?;
        let time = self.random.between(1, 50);
        self.after(time, Event::DecoderJoins);
        Ok(())
    }

    /// Whether something has happened that explains a refusal.
    fn may_refuse(&self, why: &RequestError) -> bool {
        match why {
            // Too many at once, or one that cannot fit even alone.
            RequestError::Exhausted(text) => !text.contains("fragmented"),
            RequestError::Unavailable(_) => self.report.deaths > 0,
            RequestError::Internal(text) => text.contains("computation failed"),
            _ => false,
        }
    }

    /// When nothing is left to do: every client has been told, nothing is held, and what is on the
    /// device is right.
    fn at_rest(&mut self) -> Result<(), String> {
        for (n, client) in self.clients.iter().enumerate() {
            let Some(state) = &client.state else {
                return Err(format!("request {n} was not made"));
            };
            match state.look(|p| p.ended.clone()) {
                None => return Err(format!("request {n} has no end")),
                Some(Ok(FinishReason::Cancelled)) => self.report.cancelled += 1,
                Some(Ok(_)) => self.report.answered += 1,
                Some(Err(e)) if self.may_refuse(&e) => self.report.refused += 1,
                Some(Err(e)) => return Err(format!("request {n} was refused: {e}")),
            }
        }
        let loader = &mut self.loader;
        loader.kept.try_iter().for_each(|message| loader.load.message(message));
        if !loader.load.is_at_rest() {
            return Err("the load machine is not at rest".into());
        }
        if loader.arena.held() != 0 {
            return Err(format!("{} slots are held", loader.arena.held()));
        }
        // The prefix, and what is cached.
        let known = loader.load.resident() + loader.load.earlier() + 1;
        let handles = loader.region.handles();
        if handles != known {
            return Err(format!("{handles} handles for {known} slots"));
        }
        self.report.quarantined += loader.load.world().quarantined;
        let disk = &loader.load.world().disk;
        for chunk in &self.chunks {
            if disk.get(&chunk.id).is_some_and(|file| *file != chunk.file) {
                return Err("a wrong file is on the device".into());
            }
        }
        Ok(())
    }
}

/// How this seed's world misbehaves: some seeds not at all.
fn faults(random: &mut Random) -> Faults {
    let mut some = |most: u64| if random.chance(500) { random.below(most) } else { 0 };
    Faults {
        read: some(300),
        late: some(200),
        full: some(500),
        compute: some(100),
        decoder: some(800),
        loader: some(500),
        cancel: some(500),
    }
}
