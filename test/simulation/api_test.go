// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
)

const (
	driverName    = "networkdriver.cilium.io"
	nodeName      = "node1"
	poolName      = "pool"
	podsNamespace = "default"
)

// apiServer has the objects, and the scheduler and controllers that change them.
type apiServer struct {
	sim    *sim
	pods   map[kubetypes.UID]*pod // that have an object
	claims map[string]*claim      // by name
	// published are the devices in the driver's slices.
	published []string
	// addresses are the objects of addresses, by name, and networks those that there are.
	addresses map[string]*v2alpha1.CiliumNetworkDriverAddress
	// cached are the addresses as they were when some of them were listed last.
	cached   []*v2alpha1.CiliumNetworkDriverAddress
	networks []v2alpha1.CiliumNetworkDriverNetwork
	// away is true when nobody reaches it, and cutOff has the nodes that do not.
	away   bool
	cutOff map[string]bool
	// allotments counts them.
	allotments int
}

// pod is a pod, its object and its life on the node.
type pod struct {
	uid    kubetypes.UID
	name   string
	object *corev1.Pod
	claims []*claim
	// bound is true when the scheduler has given it to the node, ending when it is to end, and ended when the node is done with it.
	bound, ending, ended bool
	// forgotten is the number of the last allotment before it was deleted by force, 0 if it was not.
	forgotten  int
	containers []*container
}

// claim is a claim object with what the simulation knows of it.
type claim struct {
	name   string
	uid    kubetypes.UID
	object *resourceapi.ResourceClaim // nil once it is gone
	// network is the one that it joins, empty for one that names a VLAN.
	network string
	vlan    int
	// driver is the one to bind, empty for one that takes the interface.
	driver   string
	requests []string
	ofPod    *pod // of a claim from a template
	// had are the devices that it is or was allotted, with the numbers of the allotments.
	had map[string][]int
	// emptied is true when somebody has emptied its status, which the driver does not see.
	emptied bool
}

func newAPIServer(s *sim) *apiServer {
	return &apiServer{sim: s, pods: map[kubetypes.UID]*pod{}, claims: map[string]*claim{}, cutOff: map[string]bool{},
		addresses: map[string]*v2alpha1.CiliumNetworkDriverAddress{}, networks: []v2alpha1.CiliumNetworkDriverNetwork{theNetwork}}
}

// newClaim makes a claim with so many requests, each with parameters.
func (a *apiServer) newClaim(name string, requests int, of *pod) *claim {
	s := a.sim
	c := &claim{name: name, uid: kubetypes.UID(s.name("uid-" + name)), vlan: 100 + s.rng.IntN(50), ofPod: of, had: map[string][]int{}}
	c.object = &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: podsNamespace, Name: name, UID: c.uid, CreationTimestamp: metav1.NewTime(time.Now()),
	}}
	if of != nil {
		controller := true
		c.object.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: of.name, UID: of.uid, Controller: &controller}}
	}
	for i := range requests {
		c.requests = append(c.requests, fmt.Sprintf("net%d", i))
		c.object.Spec.Devices.Requests = append(c.object.Spec.Devices.Requests, resourceapi.DeviceRequest{
			Name: c.requests[i], Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "class"},
		})
	}
	a.claims[name] = c
	return c
}

// newPod makes a pod that uses the named claims, which may be none, and claims of its own with so many requests each.
func (a *apiServer) newPod(name string, named []*claim, own ...int) *pod {
	p := &pod{name: name, uid: kubetypes.UID("uid-" + name)}
	p.object = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: podsNamespace, Name: name, UID: p.uid}}
	p.object.Spec.NodeName = nodeName
	for i, c := range named {
		p.claims = append(p.claims, c)
		p.object.Spec.ResourceClaims = append(p.object.Spec.ResourceClaims, corev1.PodResourceClaim{Name: fmt.Sprint("named", i), ResourceClaimName: &c.name})
	}
	for i, requests := range own {
		c := a.newClaim(fmt.Sprintf("%s-own%d", name, i), requests, p)
		p.claims = append(p.claims, c)
		template := "template"
		ref := fmt.Sprint("own", i)
		p.object.Spec.ResourceClaims = append(p.object.Spec.ResourceClaims, corev1.PodResourceClaim{Name: ref, ResourceClaimTemplateName: &template})
		p.object.Status.ResourceClaimStatuses = append(p.object.Status.ResourceClaimStatuses,
			corev1.PodResourceClaimStatus{Name: ref, ResourceClaimName: &c.name})
	}
	// One container lists the claims, as it should; another one has nothing to do with them.
	p.containers = []*container{{name: "lists", claims: p.claims}, {name: "other"}}
	a.pods[p.uid] = p
	return p
}

// delete has the pod end; by force its object is gone at once.
func (a *apiServer) delete(p *pod, force bool) {
	p.ending = true
	if force || !p.bound {
		delete(a.pods, p.uid)
		p.forgotten = a.allotments
		p.ended = p.ended || !p.bound
	}
}

func (a *apiServer) sortedPods() []*pod {
	return slices.SortedFunc(maps.Values(a.pods), func(x, y *pod) int { return cmp.Compare(x.name, y.name) })
}

func (a *apiServer) sortedClaims() []*claim {
	return slices.SortedFunc(maps.Values(a.claims), func(x, y *claim) int { return cmp.Compare(x.name, y.name) })
}

// control is what the scheduler and the controllers do in one round.
func (a *apiServer) control() {
	for _, c := range a.sortedClaims() {
		c.object.Status.ReservedFor = slices.DeleteFunc(c.object.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool {
			return a.pods[r.UID] == nil
		})
		if len(c.object.Status.ReservedFor) == 0 && c.object.Status.Allocation != nil {
			a.sim.note("  claim %s is not allotted anything any more", c.name)
			c.object.Status.Allocation, c.object.Status.Devices = nil, nil
		}
		if c.ofPod != nil && a.pods[c.ofPod.uid] == nil && c.object.Status.Allocation == nil {
			delete(a.claims, c.name)
			c.object = nil
		}
	}
	for _, p := range a.sortedPods() {
		if !p.bound && !p.ending && a.allot(p) {
			for _, c := range p.claims {
				c.object.Status.ReservedFor = append(c.object.Status.ReservedFor,
					resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p.name, UID: p.uid})
			}
			p.bound = true
			a.sim.note("  pod %s is bound", p.name)
		}
	}
}

// allot allots devices to all claims of the pod, or to none.
func (a *apiServer) allot(p *pod) bool {
	free := slices.DeleteFunc(slices.Clone(a.published), func(device string) bool {
		return slices.ContainsFunc(a.sortedClaims(), func(c *claim) bool { return slices.Contains(c.devices(), device) })
	})
	a.sim.rng.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	var wanting []*claim
	needed := needs{}
	for _, c := range p.claims {
		if c.object.Status.Allocation == nil {
			wanting = append(wanting, c)
			needed.add(c, len(c.requests))
		}
	}
	if !needed.met(a.sim.kernel, free) {
		return false
	}
	for _, c := range wanting {
		allocation := &resourceapi.AllocationResult{}
		for n, request := range c.requests {
			needed.add(c, -1)
			i := slices.IndexFunc(free, func(device string) bool {
				others := slices.DeleteFunc(slices.Clone(free), func(o string) bool { return o == device })
				return c.suits(a.sim.kernel.vf(device)) && needed.met(a.sim.kernel, others)
			})
			device := free[i]
			free = slices.Delete(free, i, i+1)
			a.allotments++
			c.had[device] = append(c.had[device], a.allotments)
			allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
				Request: request, Driver: driverName, Pool: pools.Name(nodeName, poolName), Device: device,
			})
			params := fmt.Sprintf(`{"podIfName":"%s","vlan":%d}`, c.ifName(n), c.vlan)
			switch {
			case c.driver != "":
				params = fmt.Sprintf(`{"driver":"%s","vlan":%d}`, c.driver, c.vlan)
			case c.network != "":
				params = fmt.Sprintf(`{"podIfName":"%s","network":"%s"}`, c.ifName(n), c.network)
			}
			allocation.Devices.Config = append(allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
				Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{request},
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: driverName, Parameters: kruntime.RawExtension{Raw: []byte(params)},
				}},
			})
		}
		c.object.Status.Allocation = allocation
		a.sim.note("  claim %s is allotted %v", c.name, c.devices())
	}
	return true
}

// ifName is different for all claims that a pod may have.
func (c *claim) ifName(request int) string {
	suffix := "n"
	if c.ofPod != nil {
		suffix = c.name[len(c.name)-1:]
	}
	return fmt.Sprintf("lan%s%d", suffix, request)
}

// devices are what it is allotted now.
func (c *claim) devices() []string {
	var names []string
	if c.object != nil && c.object.Status.Allocation != nil {
		for _, result := range c.object.Status.Allocation.Devices.Results {
			names = append(names, result.Device)
		}
	}
	return names
}

func (c *claim) reservedFor(p *pod) bool {
	return c.object != nil && slices.ContainsFunc(c.object.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == p.uid })
}

// client is the API server as a process reaches it.
type client struct {
	sim     *sim
	process *process
	// node is where the process is, empty for one that is always connected.
	node string
	// patient clients wait for a server that is away, until their context ends.
	patient bool
}

func (c client) away() bool { return c.sim.api.away || c.sim.api.cutOff[c.node] }

var (
	errAway = errors.New("connection refused")
	errLost = errors.New("connection reset by peer")
)

// apiLatency is how long a request or an answer is under way.
var apiLatency = span{2 * time.Millisecond, 40 * time.Millisecond}

// request has the server do something, and fails as networks do: before, or after it was done.
func (c client) request(ctx context.Context, what string, work func() error) error {
	s := c.sim
	var err error
	lost := false
	wait := func() bool { return !c.away() || !c.patient }
	unanswered := s.doUntil(ctx, &call{process: c.process, key: actorOf(ctx) + ": " + what, takes: apiLatency, ready: wait,
		effect: func() {
			switch {
			case c.away():
				err = errAway
			case !c.patient && s.chance(s.faults.apiLost):
				err = errLost
			default:
				err = work()
				lost = !c.patient && s.chance(s.faults.apiLost)
			}
			s.note("  answer: %v, lost: %v", err, lost)
		}})
	if unanswered == nil {
		unanswered = s.doUntil(ctx, &call{process: c.process, key: actorOf(ctx) + ": answer to " + what, takes: apiLatency})
	}
	if unanswered != nil {
		return unanswered
	}
	if lost {
		return errLost
	}
	return err
}

// GetClaim implements [claims.ClaimGetter].
func (c client) GetClaim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	var object *resourceapi.ResourceClaim
	err := c.request(ctx, "get claim "+name, func() error {
		present := c.sim.api.claims[name]
		if present == nil {
			return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
		}
		object = present.object.DeepCopy()
		return nil
	})
	return object, err
}

// ApplyClaimStatus implements [claims.ClaimClient].
func (c client) ApplyClaimStatus(ctx context.Context, config *resourceapply.ResourceClaimApplyConfiguration, owner claims.Owner) error {
	raw, err := json.Marshal(config.Status)
	if err != nil {
		return err
	}
	var status resourceapi.ResourceClaimStatus
	if err := json.Unmarshal(raw, &status); err != nil {
		return err
	}
	return c.request(ctx, fmt.Sprintf("apply status of claim %s, %d devices", *config.Name, len(status.Devices)), func() error {
		present := c.sim.api.claims[*config.Name]
		if present == nil {
			return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), *config.Name)
		}
		if present.uid != *config.UID {
			return apierrors.NewConflict(resourceapi.Resource("resourceclaims"), *config.Name, errors.New("uid mismatch"))
		}
		if c.sim.chance(c.sim.faults.apiLost) {
			return apierrors.NewConflict(resourceapi.Resource("resourceclaims"), *config.Name, errors.New("the object has been modified"))
		}
		// The server takes entries of allotted devices only.
		for _, entry := range status.Devices {
			if !slices.Contains(present.devices(), entry.Device) {
				return apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), *config.Name, nil)
			}
		}
		prefix := pools.Name(owner.Node, "")
		kept := slices.DeleteFunc(present.object.Status.Devices, func(entry resourceapi.AllocatedDeviceStatus) bool {
			return entry.Driver == owner.Driver && strings.HasPrefix(entry.Pool, prefix)
		})
		present.object.Status.Devices, present.emptied = append(kept, status.Devices...), false
		return nil
	})
}

// listPods lists the node's pods, trying again until the context ends.
func (c client) listPods(ctx context.Context) ([]*corev1.Pod, error) {
	c.patient = true
	var pods []*corev1.Pod
	err := c.request(ctx, "list pods", func() error {
		for _, p := range c.sim.api.sortedPods() {
			if p.bound {
				pods = append(pods, p.object.DeepCopy())
			}
		}
		return nil
	})
	return pods, err
}
