// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/counters"
	"github.com/cilium/networkdriver/pkg/networkdriver/dra"
	"github.com/cilium/networkdriver/pkg/networkdriver/health"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/nodeconfig"
	"github.com/cilium/networkdriver/pkg/networkdriver/nri"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

// minKubernetes is the first release that has DRA as a stable API.
const minKubernetes = "1.34"

// reportInterval is how long changes are collected before the node config's status is made anew.
const reportInterval = 250 * time.Millisecond

// hangLimit is how long work for the runtime may take until the agent counts as hung.
const hangLimit = time.Minute

// repairInterval is how often links that came home without their name, because it was taken, are looked at again.
const repairInterval = 10 * time.Second

// apiPatience is how long the API server may take to say what the node's configuration is, and which claims its pods have, until
// the driver goes by what the node's journal knows.
const apiPatience = 5 * time.Second

// listRetryDelay is the pause after the node's pods could not be listed.
const listRetryDelay = 2 * time.Second

// holdsTimeout bounds the search for devices that pods have when there is no config, since configs wait meanwhile.
const holdsTimeout = 30 * time.Second

const bootIDPath = "/proc/sys/kernel/random/boot_id"

// driver follows the node config: it starts the session that the config asks for, keeps it as configured, and reports.
type driver struct {
	Params
	parts        *parts
	node         *ownNode
	bootID       string
	inventory    *inventory.Inventory
	mover        *podnet.Mover
	announcer    *podnet.Announcer
	outside      *attachments.Outside
	events       *podEvents
	journal      *journal.Journal
	room         *attachments.Room
	hooks        *nri.Hooks
	nri          *nri.Plugin
	configs      *nodeconfig.Watcher
	networks     *networks.Client
	statuses     *nodeconfig.StatusWriter
	claimMetrics *claims.Metrics
	draMetrics   *dra.Metrics
	// networkMetrics outlive sessions, as the others do.
	networkMetrics *networks.Metrics
	healthMetrics  *health.Metrics
	metrics        *metrics
	// silent are the PFs that tell no counters of VFs that programs drive.
	silent *current[[]string]

	// started is closed when there is a session.
	started chan struct{}
	// notReady is why the driver does not serve at the moment, for the readiness check.
	notReady atomic.Pointer[problem]

	// What follows is used by the goroutine of run only, but for session, which is set before started is closed.

	// config is the newest node config, nil without one; active is the spec at work.
	config *v2alpha1.CiliumNetworkDriverNodeConfig
	active *v2alpha1.CiliumNetworkDriverNodeConfigSpec
	// waiting and tooOld say why the cluster cannot be served yet, or not at all.
	waiting *problem
	tooOld  *problem
	// invalid and restart say what about config is not at work.
	invalid *problem
	restart *problem
	// last says that config is the journal's, since the API server has not answered.
	last    *problem
	session *session
	// applied is what the journal is to keep of it.
	applied *current[*applied]
}

// applied is the node config at work, nil for none.
type applied struct {
	config *v2alpha1.CiliumNetworkDriverNodeConfig
}

// newDriver gives the allocations to their one owner; all others read them.
func newDriver(p Params, allocations statedb.RWTable[*tables.DRAAllocation]) (*driver, error) {
	bootID, err := os.ReadFile(bootIDPath)
	if err != nil {
		return nil, fmt.Errorf("read the kernel's boot id: %w", err)
	}
	nriMetrics, err := nri.NewMetrics(p.Metrics)
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	moveMetrics, err := attachments.NewMetrics(p.Metrics)
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	claimMetrics, draMetrics, networkMetrics, metrics := claims.NewMetrics(), dra.NewMetrics(), networks.NewMetrics(), newMetrics()
	healthMetrics := health.NewMetrics()
	for _, c := range slices.Concat(claimMetrics.Collectors(), draMetrics.Collectors(), networkMetrics.Collectors(), healthMetrics.Collectors(),
		metrics.collectors()) {
		if err := p.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	silent := newCurrent[[]string]()
	traffic := counters.New(counters.Params{
		Logger: p.Logger, DB: p.DB, Allocations: p.Allocations, Silent: silent.set, Now: time.Now,
		Open: func() (counters.Kernel, error) { return counters.OpenHost(p.Logger) },
	})
	if err := p.Metrics.Register(traffic); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	boot := strings.TrimSpace(string(bootID))
	book := journal.New(journal.Params{
		Logger: p.Logger, DB: p.DB, Table: p.Journal, Dir: p.Config.JournalDir, BootID: boot, NodeName: p.Config.NodeName,
	})
	mover := podnet.New(p.Logger, podnet.Config{Sysfs: p.Config.SysfsPath, NetSysctls: p.Config.NetSysctlPath, Debts: book})
	announcer := podnet.NewAnnouncer(p.Logger)
	events := newPodEvents(p.Clientset, p.Config.NodeName)
	outside, err := attachments.NewOutside(mover, announcer, events)
	if err != nil {
		return nil, err
	}
	configClient, err := nodeconfig.NewClient(p.RESTConfig)
	if err != nil {
		return nil, err
	}
	networkClient, err := networks.NewClient(p.RESTConfig, p.Prompt.CoreV1())
	if err != nil {
		return nil, err
	}
	outside.Journal = book
	room := attachments.New(p.Logger, p.DB, allocations, outside, moveMetrics)
	hooks := nri.NewHooks(room, p.Logger)

	d := &driver{
		Params:       p,
		networks:     networkClient,
		parts:        newParts(p.Logger),
		node:         newOwnNode(p.Logger, p.Clientset.CoreV1().Nodes(), p.Config.NodeName),
		started:      make(chan struct{}),
		applied:      newCurrent[*applied](),
		claimMetrics: claimMetrics,
		draMetrics:   draMetrics,

		networkMetrics: networkMetrics,
		healthMetrics:  healthMetrics,
		metrics:        metrics,
		silent:         silent,
		bootID:         boot,
		inventory:      inventory.New(p.Logger, p.DB, p.Devices, p.Reports, p.Allocations),
		mover:          mover,
		announcer:      announcer,
		outside:        outside,
		events:         events,
		journal:        book,
		room:           room,
		hooks:          hooks,
		nri:            nri.NewPlugin(p.Config.NRISocketPath, p.Config.NRIPluginIndex, hooks, nriMetrics, p.Logger),
		configs:        nodeconfig.NewWatcher(p.Logger, configClient, p.Config.NodeName),
		statuses:       nodeconfig.NewStatusWriter(p.Logger, configClient, p.Config.NodeName),
	}
	d.configs.Seen, d.statuses.Told = d.statuses.Seen, d.events.condition
	d.waiting = &problem{reasonStarting, "waiting for the Kubernetes API"}
	d.notReady.Store(d.waiting)
	p.Health.AddReadiness("network-driver", d.ready)
	p.Health.AddLiveness("network-driver", d.alive)
	return d, nil
}

// ready is the readiness check.
func (d *driver) ready() error {
	if p := d.notReady.Load(); p != nil {
		return fmt.Errorf("%s: %s", p.reason, p.message)
	}
	return nil
}

// alive is the liveness check, which fails for what only a restart cures: work for the runtime that hangs in the kernel,
// and a part that goes on failing by itself.
func (d *driver) alive() error {
	if work := d.hooks.Stuck(hangLimit); work != "" {
		return errors.New(work)
	}
	return d.parts.hopeless()
}

// jobs are what runs, in the order in which it is started. It is stopped in the reverse order, so that what ends is not
// reported as a problem by what still runs.
func (d *driver) jobs() []job.Job {
	jobs := []job.Job{
		d.job("node", d.node.Run),
		d.job("events", d.events.Run),
		d.job("node-config-watcher", d.configs.Run),
		d.job("node-config-status", d.statuses.Run),
		job.Timer("link-names", d.mover.Repair, repairInterval),
	}
	for _, r := range rooms {
		jobs = append(jobs, d.job(r.name, func(ctx context.Context, health cell.Health) error {
			if !wait(ctx, d.started) {
				return nil
			}
			return r.run(d.session, ctx, health)
		}))
	}
	return append(jobs, d.job("driver", d.run))
}

// job is a job that runs until the agent stops.
func (d *driver) job(name string, run job.OneShotFunc) job.Job {
	return job.OneShot(name, func(ctx context.Context, health cell.Health) error {
		d.parts.keep(ctx, health, name, func(ctx context.Context) error { return run(ctx, health) })
		return nil
	})
}

// run is the driver's life. The first valid node config, or pods that have devices already, start a session that lasts
// until the agent stops; later configs change its pools and device managers. While the API server does not answer, the config
// that was at work last does for the first.
func (d *driver) run(ctx context.Context, health cell.Health) error {
	d.Logger.Info("Network driver starts", "node", d.Config.NodeName, "sysfs", d.Config.SysfsPath)
	cluster := make(chan *problem, 1)
	go func() {
		tooOld := d.checkKubernetes(ctx)
		d.node.wait(ctx)
		cluster <- tooOld
	}()
	patience := time.NewTimer(apiPatience)
	defer patience.Stop()
	var events <-chan nodeconfig.Event // nil until the cluster is known
	for ctx.Err() == nil {
		watch := statedb.NewWatchSet()
		d.report(watch, health)
		waiting, cancel := context.WithCancel(ctx)
		changed := make(chan struct{})
		go func() {
			defer close(changed)
			_, _ = watch.Wait(waiting, reportInterval)
		}()
		select {
		case d.tooOld = <-cluster:
			d.waiting, events = nil, d.configs.Events()
			if d.tooOld != nil {
				patience.Stop()
			}
		case event := <-events:
			patience.Stop()
			d.config, d.last = event.Config, nil
			d.metrics.lastConfig.Set(0)
			if d.tooOld == nil {
				d.apply(ctx)
			}
		case <-patience.C:
			d.startFromLast()
		case <-changed:
		}
		cancel()
		<-changed
	}
	return nil
}

// checkKubernetes returns why the cluster is not supported, nil if it is. Nothing is registered then, and the rest of
// the agent goes on.
func (d *driver) checkKubernetes(ctx context.Context) *problem {
	found, err := client.WaitForVersion(ctx, d.Clientset.Discovery(), minKubernetes, d.Logger)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		d.Logger.Error("The network driver stays off", "error", err)
		return &problem{reasonKubernetesVersion, err.Error()}
	}
	d.Logger.Info("Kubernetes is supported", "version", found, "needed", minKubernetes)
	return nil
}

// apply brings the newest config to work, as far as it is valid.
func (d *driver) apply(ctx context.Context) {
	d.invalid, d.restart = nil, nil
	if d.config == nil {
		d.Logger.Info("There is no node config: nothing is advertised, devices in pods stay there")
		d.active = nil
		if d.session == nil {
			d.forgetLast()
			d.serveHeld(ctx, v2alpha1.DefaultDriverName)
		} else {
			d.session.configure(nil)
		}
		d.applied.set(&applied{})
		return
	}
	spec := d.config.Spec.DeepCopy()
	spec.Default()
	log := d.Logger.With("nodeConfig", d.config.Name, "generation", d.config.Generation)
	if err := spec.Validate(); err != nil {
		log.Error("Node config is invalid, what was at work before stays", "error", err)
		d.invalid = &problem{reasonInvalidConfig, err.Error()}
		if d.session == nil {
			d.serveHeld(ctx, spec.DriverName)
		}
		return
	}
	if d.session == nil {
		d.startSession(spec, spec)
	} else {
		d.session.configure(spec)
	}
	if s := d.session; !s.registersAs(spec) {
		message := fmt.Sprintf("driverName and draRegistration settings are read when the agent starts: it is registered as %s, restart it to change them", s.spec.DriverName)
		log.Warn("Node config asks for a restart of the agent", "reason", message)
		d.restart = &problem{reasonRestartRequired, message}
	}
	d.active = spec
	d.applied.set(&applied{d.config})
	log.Info("Node config is applied", "pools", len(spec.Pools))
}

// startFromLast starts a session from the node config that was at work last, if there was one: the pods that have devices must not
// wait for the API server. What that says later is applied as a change.
func (d *driver) startFromLast() {
	last, err := d.journal.LastConfig()
	if err != nil || last == nil {
		if err != nil {
			d.Logger.Error("The API server does not answer, and what was configured last cannot be told; nothing is served", "error", err)
		}
		return
	}
	spec := last.Config.Spec.DeepCopy()
	spec.Default()
	log := d.Logger.With("nodeConfig", last.Config.Name, "generation", last.Config.Generation)
	if err := spec.Validate(); err != nil {
		log.Error("The API server does not answer, and the last node config is none of this version; nothing is served", "error", err)
		return
	}
	d.last = &problem{reasonLastConfig, fmt.Sprintf("running from the last node config, of generation %d: the API server has not said what it is now since the agent was started",
		last.Config.Generation)}
	log.Warn("Running from the last node config", "reason", d.last.message)
	d.metrics.lastConfig.Set(1)
	d.node.assume(last.Addresses)
	d.config, d.active = last.Config, spec
	d.startSession(spec, spec)
}

// forgetLast has an agent that is started while the API server is away not go by a node config that is gone.
func (d *driver) forgetLast() {
	if err := d.journal.SaveConfig(nil, nil); err != nil {
		d.Logger.Error("An agent that is started while the API server is away would go by a node config that is gone", "error", err)
	}
}

// startSession starts the driver under the spec's name, with the pools and device managers of config, none for nil.
func (d *driver) startSession(spec, config *v2alpha1.CiliumNetworkDriverNodeConfigSpec) {
	d.session = d.newSession(spec)
	d.session.configure(config)
	d.session.expectManagers()
	close(d.started)
}

// serveHeld starts a session that offers nothing when pods of this node have devices of the driver from before the agent
// was started: without a valid config too they have to be attached to new sandboxes and, above all, given back.
//
// The driver's name is never taken from the pods' claims. Whoever may write a claim's status could have the agent
// register with kubelet in the place of another driver.
func (d *driver) serveHeld(ctx context.Context, driverName string) {
	spec := &v2alpha1.CiliumNetworkDriverNodeConfigSpec{DriverName: driverName}
	spec.Default()
	if spec.Validate() != nil {
		return // the name is what is invalid
	}
	held, err := d.holds(ctx, spec.DriverName)
	switch {
	case ctx.Err() != nil || err == nil && !held:
		return
	case err != nil:
		d.Logger.Warn("Cannot find out whether pods of this node have devices, and there is no valid node config: taken for granted",
			"driver", spec.DriverName, "error", err)
	default:
		d.Logger.Warn("Pods of this node are allotted devices, and there is no valid node config: their devices are looked after, none are offered",
			"driver", spec.DriverName)
	}
	d.startSession(spec, nil)
}

// holds says whether there are devices to look after: the journal has some, or pods of this node are allotted some.
func (d *driver) holds(ctx context.Context, driverName string) (bool, error) {
	if err := d.journal.Open(); err != nil {
		return false, err
	}
	if slices.ContainsFunc(d.journal.Entries(), func(e *journal.Entry) bool { return e.Driver == driverName }) {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, holdsTimeout)
	defer cancel()
	pods, err := d.listPods(ctx)
	if err != nil {
		return false, err
	}
	return claims.NewRestorer(claims.RestorerParams{
		Logger: d.Logger, Claims: claims.NewClaimClient(d.Clientset.ResourceV1()),
		DriverName: driverName, NodeName: d.Config.NodeName,
	}).Allotted(ctx, pods)
}

// listPods lists the pods of this node. The error is the context's.
func (d *driver) listPods(ctx context.Context) ([]*corev1.Pod, error) {
	selector := fields.OneTermEqualSelector("spec.nodeName", d.Config.NodeName).String()
	var failing logonce.Problems[metav1.StatusReason]
	for {
		list, err := d.Clientset.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: selector})
		if err == nil {
			pods := make([]*corev1.Pod, len(list.Items))
			for i := range list.Items {
				pods[i] = &list.Items[i]
			}
			return pods, nil
		}
		level := failing.Level(apierrors.ReasonForError(err), slog.LevelWarn)
		d.Logger.Log(ctx, level, "Cannot list the node's pods, trying again", "error", err)
		if !pause.For(ctx, listRetryDelay) {
			return nil, ctx.Err()
		}
	}
}
