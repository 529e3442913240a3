// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
)

// requestTimeout is how long the runtime waits for a plugin.
const requestTimeout = 2 * time.Second

// containerRuntime makes sandboxes and containers, and tells the plugin that is connected.
type containerRuntime struct {
	sim       *sim
	process   *process
	sandboxes []*sandbox
	plugin    *agent // that is connected, or nil
	// off is true while NRI is out of order.
	off bool
	// A plugin is synchronized while no request is under way.
	requests int
	syncing  bool
}

// sandbox is a pod sandbox.
type sandbox struct {
	id    string
	pod   *pod
	netns string
	// listed is true once the runtime knows it, ready while it runs.
	listed, ready bool
	containers    []*container
}

// container is one of a pod. It starts anew in each sandbox.
type container struct {
	name    string
	claims  []*claim
	sandbox *sandbox
	started bool
	// opened are the VFs that it has by their device nodes.
	opened []opened
}

func (r *containerRuntime) of(pod kubetypes.UID) (list []*sandbox) {
	for _, sb := range r.sandboxes {
		if sb.pod.uid == pod && sb.listed {
			list = append(list, sb)
		}
	}
	return list
}

func (r *containerRuntime) remove(sb *sandbox) {
	r.sandboxes = slices.DeleteFunc(r.sandboxes, func(o *sandbox) bool { return o == sb })
}

// die ends the sandbox's processes. The namespace stays, as it is held by a file; those that the pod has made do not.
func (r *containerRuntime) die(sb *sandbox) {
	sb.ready = false
	for _, c := range sb.containers {
		c.started = false
	}
	sb.containers = nil
	r.sim.kernel.end(sb.netns + "-own")
}

// exit ends a container.
func (r *containerRuntime) exit(c *container) {
	c.started = false
	c.sandbox.containers = slices.DeleteFunc(c.sandbox.containers, func(o *container) bool { return o == c })
}

func (sb *sandbox) event(withNetNS bool) *api.PodSandbox {
	p := &api.PodSandbox{Id: sb.id, Uid: string(sb.pod.uid), Namespace: podsNamespace, Name: sb.pod.name, Linux: &api.LinuxPodSandbox{}}
	if withNetNS {
		p.Linux.Namespaces = []*api.LinuxNamespace{{Type: "network", Path: sb.netns}}
	}
	return p
}

// serve has the runtime work on a request of the process. It goes on with it if the process ends.
func (r *containerRuntime) serve(p *process, what string, work func() error) (err error) {
	done := make(chan error, 1)
	runtime := r.process
	go func() { done <- work() }()
	select {
	case err = <-done:
	case <-p.ctx.Done():
	case <-runtime.ctx.Done():
		err = errors.New("the runtime has gone away")
	}
	r.sim.do(&call{process: p, key: "answer of the runtime to " + what})
	return err
}

// begin waits until no plugin is being synchronized; it is over when end is called within a step.
func (r *containerRuntime) begin(what string, effect func()) (end func()) {
	r.sim.do(&call{process: r.process, key: what, takes: span{time.Millisecond, 50 * time.Millisecond},
		ready: func() bool { return !r.syncing }, effect: func() { r.requests++; effect() }})
	return func() { r.requests-- }
}

// hook tells the plugin, if there is one. An event that is not answered fails the request.
func (r *containerRuntime) hook(what string, work func(context.Context, *agent) error) error {
	a := r.plugin
	if a == nil {
		return nil
	}
	return r.sim.ask(r.process, a, what, requestTimeout, func(ctx context.Context) error { return work(ctx, a) })
}

// run makes a sandbox for the pod.
func (r *containerRuntime) run(pod *pod) error {
	s, p := r.sim, r.process
	var sb *sandbox
	end := r.begin("run sandbox of "+pod.name, func() {
		id := s.name("sandbox")
		sb = &sandbox{id: id, pod: pod, netns: "/run/netns/" + id}
		r.sandboxes = append(r.sandboxes, sb)
		s.kernel.namespaces[sb.netns] = &namespace{path: sb.netns, pod: pod}
		s.note("  it is %s", id)
	})
	err := r.hook("RunPodSandbox "+sb.id, func(ctx context.Context, a *agent) error {
		return a.hooks.RunPodSandbox(ctx, sb.event(true))
	})
	if err == nil {
		s.do(&call{process: p, key: "sandbox of " + pod.name + " runs", takes: span{time.Millisecond, 30 * time.Millisecond}, effect: func() {
			sb.listed, sb.ready = true, true
			end()
		}})
		return nil
	}
	s.do(&call{process: p, key: "sandbox of " + pod.name + " is taken down", effect: func() { s.kernel.end(sb.netns) }})
	_ = r.hook("RemovePodSandbox "+sb.id, func(ctx context.Context, a *agent) error {
		return a.hooks.RemovePodSandbox(ctx, sb.event(true))
	})
	s.do(&call{process: p, key: "sandbox of " + pod.name + " is removed", effect: func() { r.remove(sb); end() }})
	return fmt.Errorf("run sandbox: %w", err)
}

// resolve returns what the CDI devices of a container's claims give it.
func (r *containerRuntime) resolve(c *container) (all specs.ContainerEdits, err error) {
	for _, claim := range c.claims {
		for _, request := range claim.requests {
			for _, id := range []string{cdi.ID(driverName, claim.uid, request), metadataID(claim.uid, request)} {
				edits, ok := r.cdiDevice(id)
				if !ok {
					return all, fmt.Errorf("unresolvable CDI devices %s", id)
				}
				all.Env, all.DeviceNodes = append(all.Env, edits.Env...), append(all.DeviceNodes, edits.DeviceNodes...)
				all.Mounts = append(all.Mounts, edits.Mounts...)
			}
		}
	}
	return all, nil
}

func (r *containerRuntime) cdiDevice(id string) (edits specs.ContainerEdits, ok bool) {
	files, err := filepath.Glob(filepath.Join(r.sim.cdiDir(), "*.json"))
	if err != nil {
		return edits, false
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		var spec specs.Spec
		if err != nil || json.Unmarshal(data, &spec) != nil {
			continue
		}
		for _, d := range spec.Devices {
			if spec.Kind+"="+d.Name == id {
				return d.ContainerEdits, true
			}
		}
	}
	return edits, false
}

// start makes and starts a container.
func (r *containerRuntime) start(sb *sandbox, c *container) error {
	s, p := r.sim, r.process
	var edits specs.ContainerEdits
	var nodes []string
	var had []*vf
	var has []opened
	var err error
	end := r.begin(fmt.Sprintf("create container %s of %s in %s", c.name, sb.pod.name, sb.id), func() {
		had = s.kernel.in(sb.netns)
		if !s.mutant.noCDI {
			edits, err = r.resolve(c)
		}
		for _, node := range edits.DeviceNodes {
			nodes = append(nodes, node.Path)
		}
		if err == nil {
			has, err = s.kernel.open(nodes)
		}
	})
	if err == nil {
		err = r.hook("CreateContainer "+sb.id+" "+c.name, func(ctx context.Context, a *agent) error {
			ctr := &api.Container{Id: c.name, PodSandboxId: sb.id, Name: c.name, Env: edits.Env}
			_, _, err := a.hooks.CreateContainer(ctx, sb.event(true), ctr)
			return err
		})
	}
	takes := span{time.Millisecond, 30 * time.Millisecond}
	if s.chance(s.faults.starved) {
		takes = span{time.Second, time.Minute} // on a node under load it took a quarter of one
	}
	s.do(&call{process: p, key: fmt.Sprintf("start container %s of %s", c.name, sb.pod.name), takes: takes, effect: func() {
		end()
		var read []v1beta1.Device
		if err == nil {
			read, err = readAll(edits.Mounts)
		}
		switch {
		case err != nil:
		case !sb.ready:
			err = errors.New("the sandbox has ended")
		case !s.mutant.noHook && r.otherSandbox(edits.Env, sb):
			err = errors.New("createRuntime hook: the claim's devices are in another sandbox")
		case !s.mutant.noGroups && !s.kernel.areNodesOf(nodes, edits.Env):
			err = errors.New("createRuntime hook: the IOMMU groups are not the claims' devices' any more")
		default:
			c.started, c.sandbox, c.opened = true, sb, has
			sb.containers = append(sb.containers, c)
			s.checkStarted(c, had, read)
			return
		}
		s.note("  not started: %v", err)
	}})
	return err
}

// otherSandbox is what the hook in the CDI files sees: whether a claim's devices are in another sandbox than the container.
func (r *containerRuntime) otherSandbox(env []string, sb *sandbox) bool {
	return slices.ContainsFunc(cdi.MarkersIn(env), func(m cdi.Marker) bool { return m.Sandbox != sb.id })
}

// stop ends a sandbox.
func (r *containerRuntime) stop(sb *sandbox) error {
	s, p := r.sim, r.process
	withNetNS := false
	end := r.begin("stop "+sb.id, func() { r.die(sb); withNetNS = s.chance(0.5) })
	_ = r.hook("StopPodSandbox "+sb.id, func(ctx context.Context, a *agent) error {
		return a.hooks.StopPodSandbox(ctx, sb.event(withNetNS))
	})
	s.do(&call{process: p, key: sb.id + " is stopped", takes: span{time.Millisecond, 100 * time.Millisecond}, effect: func() {
		s.kernel.end(sb.netns)
		end()
	}})
	return nil
}

// forget removes a stopped sandbox.
func (r *containerRuntime) forget(sb *sandbox) error {
	s, p := r.sim, r.process
	end := r.begin("remove "+sb.id, func() {})
	_ = r.hook("RemovePodSandbox "+sb.id, func(ctx context.Context, a *agent) error {
		return a.hooks.RemovePodSandbox(ctx, sb.event(false))
	})
	s.do(&call{process: p, key: sb.id + " is removed", effect: func() { r.remove(sb); end() }})
	return nil
}

// connect synchronizes the agent and tells it of events from then on.
func (r *containerRuntime) connect(a *agent) bool {
	s := r.sim
	var pods []*api.PodSandbox
	var containers []*api.Container
	s.do(&call{process: a.process, key: "connect to the runtime", takes: span{time.Millisecond, 100 * time.Millisecond},
		ready: func() bool { return !r.off && !r.syncing && r.requests == 0 },
		effect: func() {
			r.syncing = true
			for _, sb := range r.sandboxes {
				if !sb.listed {
					continue
				}
				pods = append(pods, sb.event(true))
				for _, c := range sb.containers {
					containers = append(containers, &api.Container{Id: c.name, PodSandboxId: sb.id, Name: c.name})
				}
			}
		}})
	err := s.ask(a.process, a, "Synchronize", requestTimeout, func(ctx context.Context) error {
		_, err := a.hooks.Synchronize(ctx, pods, containers)
		return err
	})
	connected := false
	s.do(&call{process: a.process, key: "connected to the runtime", effect: func() {
		r.syncing = false
		if err == nil && !r.off {
			connected, r.plugin = true, a
		}
	}})
	return connected
}

// lose ends the connection.
func (r *containerRuntime) lose() {
	r.plugin = nil
}

func (sb *sandbox) String() string {
	var names []string
	for _, c := range sb.containers {
		names = append(names, c.name)
	}
	return fmt.Sprintf("%s of %s, ready %v, containers %s", sb.id, sb.pod.name, sb.ready, strings.Join(names, ","))
}
